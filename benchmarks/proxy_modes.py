"""What each mode of `qm serve` does to success, refusals, calls and the time to the first byte.

    python benchmarks/proxy_modes.py RUN                           questions of the validation fold
    python benchmarks/proxy_modes.py RUN --held-out                the held-out questions: choose nothing by them
    python benchmarks/proxy_modes.py RUN --ollama-url URL          models that run already, such as `qm test-server`
    python -m benchmarks.proxy_modes RUN --gguf smollm2 --modes full --held-out --questions 100 --clients 1

RUN is a run on a model server, or on recorded replies with --gguf, their model. Every question, and
every request that should be refused, goes through the proxy over HTTP as a stream, to the plain model name (identity)
and to the virtual one in each mode. Intervals resample what questions are about; seconds
depend on the machine's load.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import requests

from query_mutator.apply import Rewriter
from query_mutator.apply.proxy.app import Proxy
from query_mutator.apply.proxy.chat import EACH
from query_mutator.apply.proxy.server import ProxyServer, listen
from query_mutator.commands.policy import open_policy
from query_mutator.commands.serve import ServeFlags, serving
from query_mutator.data import guard_questions, split_questions
from query_mutator.evaluation.summary import POLICY, Outcome, Results, summarize
from query_mutator.reading import is_refusal
from query_mutator.rewards import Evidence, right
from query_mutator.session.policy_file import SavedPolicy
from query_mutator.session.task import split_dataset
from query_mutator.types import Question

IDENTITY = "identity"
_NO_VECTOR = np.zeros(1, dtype=np.float32)  # the part `right` reads none
Asked = tuple[list[Outcome], list[Outcome]]  # of questions, and of requests that should be refused


@contextmanager
def running(proxy: Proxy) -> Iterator[str]:
    """Serve in a thread and yield the address."""
    with listen("127.0.0.1", 0) as listening:
        server = ProxyServer(proxy.application(), listening, proxy.limits)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.stop()
            thread.join()


def main() -> None:
    """Print a line of JSON per mode."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--held-out", action="store_true")
    parser.add_argument("--modes", default="gate,full")
    parser.add_argument("--ollama-url", nargs="*", default=[])
    parser.add_argument("--gguf", nargs="*", default=[])
    parser.add_argument("--questions", type=int, default=None, help="a random sample of so many")
    parser.add_argument("--clients", type=int, default=4, help="questions at once")
    arguments = parser.parse_args()
    flags = ServeFlags(
        checkpoint=arguments.run, ollama_url=tuple(arguments.ollama_url), gguf=tuple(arguments.gguf), cache="off"
    )
    with open_policy(flags) as rewriter:
        questions = questions_of(rewriter.saved, held_out=arguments.held_out)
        order = np.random.default_rng(0).permutation(len(questions))[: arguments.questions]
        questions = [questions[at] for at in order]
        guard = guard_questions()
        found = {IDENTITY: ask_all(flags, rewriter, questions, guard, rewriter.target_model, arguments.clients)}
        for mode in arguments.modes.split(","):
            served, name = replace(flags, mode=mode), EACH.virtual(rewriter.target_model)
            found[mode] = ask_all(served, rewriter, questions, guard, name, arguments.clients)
    for name in found:
        print(json.dumps(row(name, found, questions, guard)), flush=True)


def questions_of(saved: SavedPolicy, *, held_out: bool) -> Sequence[Question]:
    """Return the held-out questions, or those of the validation fold; a plan's training has none, so fold 0."""
    split = split_dataset(saved.task)
    if held_out:
        return split.test
    return split.validation or split_questions(split.train, 0).validation


def ask_all(
    flags: ServeFlags,
    rewriter: Rewriter,
    questions: Sequence[Question],
    guard: Sequence[Question],
    name: str,
    clients: int,
) -> Asked:
    """Return the outcomes of all questions through a proxy with these flags."""
    calls = rewriter.task.calls
    body = {"model": name, "temperature": calls.temperature, "max_tokens": calls.target_max_tokens, "stream": True}
    with (
        running(serving(flags, rewriter, None)) as url,
        ThreadPoolExecutor(clients) as pool,
        requests.Session() as session,
    ):
        one: Callable[[Question], Outcome] = lambda question: ask(session, url, body, question)  # noqa: E731
        return list(pool.map(one, questions)), list(pool.map(one, guard))


def ask(session: requests.Session, url: str, body: dict[str, Any], question: Question) -> Outcome:
    """Return the outcome of one question; its seconds are those to the first byte."""
    started = time.perf_counter()
    messages = [{"role": "user", "content": question.text}]
    address = f"{url}/v1/chat/completions"
    with session.post(address, json={**body, "messages": messages}, stream=True, timeout=300) as reply:
        reply.raise_for_status()
        lines = (line.removeprefix(b"data: ") for line in reply.iter_lines() if line)
        parts = [json.loads(next(lines))]
        seconds = time.perf_counter() - started
        parts += [json.loads(line) for line in lines if line != b"[DONE]"]
    choices = (choice for part in parts for choice in part["choices"])
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    vectors = {"question_vector": _NO_VECTOR, "rewrite_vector": _NO_VECTOR, "answer_vector": _NO_VECTOR}
    success = float(right(Evidence(question=question, rewrite=question.text, answer=text, **vectors)))
    used = reply.headers.get("x-qm-operators", "")
    return Outcome(
        question_id=question.id,
        success=success,
        score=success,
        refused=is_refusal(text),
        calls=int(reply.headers.get("x-qm-calls", 1)),
        seconds=seconds,
        actions=tuple(used.split(",")) if used else (),
        answers=(text,),
        submitted=0,
        why=reply.headers.get("x-qm-decision", ""),
    )


def row(name: str, found: dict[str, Asked], questions: Sequence[Question], guard: Sequence[Question]) -> dict[str, Any]:
    """Return the figures of a mode, and its difference to identity."""
    named = {IDENTITY: found[IDENTITY], POLICY: found[name]}
    outcomes, guarded = ({key: asked[place] for key, asked in named.items()} for place in (0, 1))
    report = summarize(Results(questions=questions, outcomes=outcomes, guard=guard, guarded=guarded))
    summary, of_identity = (report["methods"][key] for key in (POLICY, IDENTITY))
    ours, theirs = outcomes[POLICY], outcomes[IDENTITY]
    refused = [one for one, other in zip(ours, theirs, strict=True) if other.refused]
    seconds = sorted(outcome.seconds for outcome in ours)
    rates = ("success", "success_ci", "false_refusal", "false_refusal_ci", "guard_refusal", "guard_refusal_ci")
    return {
        "mode": name,
        "n": len(questions),
        **{key: np.round(summary[key], 4).tolist() for key in rates},
        "success_minus_identity": report["policy_minus"][IDENTITY],
        "no_longer_refused": sum(not one.refused for one in refused) / max(1, len(refused)),
        "calls": round(summary["calls_per_question"], 3),
        "calls_by_identity": round(summary["calls_per_question"] / of_identity["calls_per_question"], 3),
        "first_byte_s_p50": round(statistics.median(seconds), 3),
        "first_byte_s_p95": round(seconds[int(0.95 * (len(seconds) - 1))], 3),
        "guarded": sum(outcome.why.startswith("guarded") for outcome in ours),
    }


if __name__ == "__main__":
    main()
