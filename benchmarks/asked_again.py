"""Whether a live model says again what is recorded: requests of a recording, asked with several calls in flight.

    python -m benchmarks.asked_again --recording FILE --gguf smollm2 --questions 50 --slots 8

The requests are those of random training questions, wordings and forms. Prints how many replies have the same text, and
how many another grade of the reward part `committed`, as a line of JSON; `--show` prints those that differ.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import NamedTuple

import numpy as np

from query_mutator import forms
from query_mutator.data.bundled import FOLDER
from query_mutator.data.split import in_test
from query_mutator.encoder.weights import DEFAULT_ENCODER
from query_mutator.env.task import CallSettings, Task
from query_mutator.llm.llama import LlamaBackend
from query_mutator.llm.recorded import RecordedBackend, Recording
from query_mutator.rewards import Evidence
from query_mutator.rewards.committed import FAMILY, committed
from query_mutator.types import AS_IS, ChatRequest, Completion, Question
from scripts.recorded_requests import MAX_TOKENS, task_of, versions_of

CONTEXT = 1024  # tokens of a slot, as the recording had
_NO_VECTOR = np.zeros(1, dtype=np.float32)


class Again(NamedTuple):
    """A recorded request, its question and form, the reply that is recorded and the one of now."""

    question: Question
    form: str
    request: ChatRequest
    recorded: Completion
    live: Completion

    @property
    def is_identical(self) -> bool:
        """Return whether the model said the same."""
        return self.live.text == self.recorded.text

    @property
    def has_another_grade(self) -> bool:
        """Return whether one reply is right and the other is not."""
        return self.grade(self.live) != self.grade(self.recorded)

    def grade(self, reply: Completion) -> float:
        """Return whether a reply is right."""
        return committed(
            Evidence(
                question=self.question,
                rewrite=self.question.text,
                answer=forms.get(self.form).read(reply.text),
                question_vector=_NO_VECTOR,
                rewrite_vector=_NO_VECTOR,
                answer_vector=_NO_VECTOR,
            )
        )


def main() -> None:
    """Print how many replies are the same."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recording", help="a file, or the name of a bundled recording; by default the first one")
    parser.add_argument("--gguf", default="smollm2", help="the model's file, or smollm2")
    parser.add_argument("--dataset", default=str(FOLDER / "general.jsonl"), help="the recorded questions")
    parser.add_argument("--encoder", default=DEFAULT_ENCODER, help="chose the examples that forms show")
    parser.add_argument("--questions", type=int, default=50, help="requests to ask")
    parser.add_argument("--slots", type=int, default=8, help="calls in flight")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of requests")
    parser.add_argument("--show", action="store_true", help="print the replies that differ")
    arguments = parser.parse_args()
    found = asked_again(
        arguments.recording,
        arguments.gguf,
        arguments.dataset,
        encoder=arguments.encoder,
        count=arguments.questions,
        slots=arguments.slots,
        seed=arguments.seed,
    )
    for one in found if arguments.show else ():
        if not one.is_identical:
            sides = [(reply.text, one.grade(reply)) for reply in (one.recorded, one.live)]
            print(json.dumps([one.question.id, one.form, one.question.accept, *sides]), file=sys.stderr)
    identical, other = sum(one.is_identical for one in found), sum(one.has_another_grade for one in found)
    print(json.dumps({"asked": len(found), "identical": identical, "another_grade": other, "slots": arguments.slots}))


def asked_again(
    recording: str | None, gguf: str, dataset: str, *, encoder: str, count: int, slots: int, seed: int = 0
) -> list[Again]:
    """Ask a random `count` of recorded requests at temperature 0 of the model, `slots` at a time."""
    (source,) = RecordedBackend.open([recording] if recording else [])
    (server,) = LlamaBackend.open([gguf], pool_size=slots, runner_options={"num_ctx": CONTEXT})
    with closing(server):
        model = source.recording.head.model
        calls = CallSettings(target_model=model, mutator_model=model, target_max_tokens=MAX_TOKENS)
        task = task_of(dataset, calls, encoder=encoder)
        known = [*recorded(task, dataset, source.recording)]
        chosen = random.Random(seed).sample(known, min(count, len(known)))
        with ThreadPoolExecutor(slots) as pool:
            replies = list(pool.map(server.complete, [request for _, _, request, _ in chosen]))
    failed = next((reply.error for reply in replies if reply.error and reply.error.kind != "empty"), None)
    if failed:
        sys.exit(f"a call failed: {failed}")
    return [Again(*one, reply) for one, reply in zip(chosen, replies, strict=True)]


def recorded(
    task: Task, dataset: str, recording: Recording, *, cleaned_by: Sequence[str] = ("clean",)
) -> Iterator[tuple[Question, str, ChatRequest, Completion]]:
    """Yield the recorded requests on training questions, each once, with question, form and reply."""
    seen: set[tuple[str, ...]] = set()
    for version in versions_of(dataset, task, cleaned_by=cleaned_by):
        for form in (AS_IS, *(form.name for form in task.forms)):
            for index, text in version.items():
                question = task.questions[index]
                if in_test(question) or not any(tag.startswith(FAMILY) for tag in question.tags):
                    continue
                request = task.target(index, text, form)
                key = tuple(message.content for message in request.messages)
                reply = recording.find(request)
                if reply is not None and key not in seen:
                    seen.add(key)
                    yield question, form, request, reply


if __name__ == "__main__":
    main()
