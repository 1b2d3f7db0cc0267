"""Which requests are recorded, in the order in which they are asked: useful wherever the recording stops.

Forms come one after the other, `as_is` first, each with the versions of all texts, held-out and training questions
alike; random replies come last.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from query_mutator import forms
from query_mutator.data.bundled import general_bank, guard_questions
from query_mutator.data.loaders import load_questions
from query_mutator.encoder import resolve_encoder
from query_mutator.env.task import CallSettings, Task, build_task
from query_mutator.errors import UsageError
from query_mutator.operators import get, local_rewrite
from query_mutator.types import AS_IS, ChatRequest

MAX_TOKENS = 32  # of a reply, in all forms
#: The forms in which the texts before they were spoiled are asked: what an ideal cleaner would bring.
YARDSTICK = (AS_IS, "question_answer", "short_answer", "statement", "expert")
TEMPERATURE = 0.7  # of the random replies
SAMPLES = 3

Version = dict[int, str]  # a text of each question by its number in the task, without those that it equals


def task_of(dataset: str, calls: CallSettings, *, encoder: str, forms_asked: str = forms.ALL) -> Task:
    """Return the task on all questions of a file, and on the guard requests, with forms."""
    questions = load_questions(Path(dataset))
    task = build_task(
        questions,
        calls=calls,
        encoder=resolve_encoder(encoder),
        operators=(),
        known_words=(),
        forms=forms.select(forms_asked),
        bank=general_bank(),
    )
    return task.on([*questions, *guard_questions()])


def versions_of(dataset: str, task: Task, *, cleaned_by: Sequence[str]) -> list[Version]:
    """Return the texts as they stand, those after local operators one after the other, and the `clean` ones."""
    found = [{index: question.text for index, question in enumerate(task.questions)}]
    for name in cleaned_by:
        rewrite = local_rewrite(get(name))
        if rewrite is None:
            raise UsageError(f"--cleaned-by {name}: a model carries it out; name operators that call none")
        contexts = (task.context(index) for index in found[-1])
        found.append(
            {
                index: rewrite(text, context=context)
                for (index, text), context in zip(found[-1].items(), contexts, strict=True)
            }
        )
    lines = Path(dataset).read_text(encoding="utf-8").splitlines()
    clean = {row["id"]: row.get("clean") for row in map(json.loads, lines)}
    found.append({index: clean.get(question.id) or question.text for index, question in enumerate(task.questions)})
    return found


def requests_of(
    task: Task, versions: Sequence[Version], *, sampled: Sequence[str] = (), samples: int = SAMPLES
) -> Iterator[ChatRequest]:
    """Yield the requests; those for random replies in the forms `sampled` have `sample` 0 to `samples` - 1.

    The last version is a yardstick that no policy reaches. Random replies are to the version before, the cleaned one.
    """
    for form in (AS_IS, *(form.name for form in task.forms)):
        yield from _in_form(task, versions if form in YARDSTICK else versions[:-1], form)
    for form in sampled:
        for number in range(samples):
            for request in _in_form(task, versions[-2:-1], form):
                yield replace(request, temperature=TEMPERATURE, sample=number)


def _in_form(task: Task, versions: Sequence[Version], form: str) -> Iterator[ChatRequest]:
    for version in versions:
        for index, text in version.items():
            yield task.target(index, text, form)
