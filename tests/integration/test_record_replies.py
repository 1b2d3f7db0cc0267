"""Recording a model's replies: which requests, in which order, and that none is asked twice."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from query_mutator.data import guard_questions
from query_mutator.env.task import CallSettings
from query_mutator.llm.recorded import RecordedBackend
from query_mutator.testing import start_server
from query_mutator.types import AS_IS
from scripts.record_replies import without_repeats
from scripts.recorded_requests import MAX_TOKENS, requests_of, task_of, versions_of

ROOT = Path(__file__).resolve().parents[2]
SLOTS = 4
ROWS = [
    {"id": f"q{number}", "query": f"wat is {number} plus 1", "clean": f"What is {number} plus 1?", "accept": ["x"]}
    for number in range(12)
]


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in [*ROWS, {**ROWS[0], "id": "plain", "clean": None}]))
    return path


class Counting:
    """A model that keeps what it was asked."""

    name = "slow"

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()

    def reply(self, prompt: str) -> str:
        self.asked[prompt] += 1
        return f"Reply to {prompt[:40]}"


def test_requests_come_form_by_form_and_random_ones_last(dataset: Path) -> None:
    calls = CallSettings(target_model="m", mutator_model="m", target_max_tokens=40)
    task = task_of(str(dataset), calls, encoder="hash")
    versions = versions_of(str(dataset), task)
    wanted = [*without_repeats(requests_of(task, versions, sampled=[AS_IS], samples=2)).values()]
    texts = [request.messages[-1].content for request in wanted]
    asked = [*(row["query"] for row in ROWS), *(question.text for question in guard_questions())]  # equal ones once
    assert texts[: len(asked) + 12] == [*asked, *(row["clean"] for row in ROWS)]
    assert texts[len(asked) + 12] == f"Question: {ROWS[0]['query']}\nAnswer:"
    drawn = [(request.temperature, request.sample) for request in wanted[-2 * len(asked) :]]
    assert drawn == [(0.7, 0)] * len(asked) + [(0.7, 1)] * len(asked)
    assert {request.temperature for request in wanted[: -2 * len(asked)]} == {0.0}
    assert any(len(request.messages) > 1 for request in wanted)  # examples as turns
    assert {request.max_tokens for request in wanted} == {40}


@pytest.mark.slow
def test_a_recording_that_is_made_again_asks_nothing_twice(dataset: Path, tmp_path: Path) -> None:
    out, store = tmp_path / "own.jsonl.xz", tmp_path / "replies.sqlite"
    model = Counting()
    with start_server([model], num_parallel=SLOTS) as server:
        command = [
            sys.executable, "scripts/record_replies.py", "--ollama-url", server.url, "--target-model", "slow",
            "--dataset", dataset, "--out", out, "--store", store, "--encoder", "hash", "--sampled", AS_IS,
            "--slots", str(SLOTS), "--no-logprobs",
        ]  # fmt: skip
        for _ in range(2):  # the second one asks nothing
            made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
            assert made.returncode == 0, made.stderr
    (backend,) = RecordedBackend.open([str(out)])
    calls = CallSettings(target_model="slow", mutator_model="slow", target_max_tokens=MAX_TOKENS)
    task = task_of(str(dataset), calls, encoder="hash")
    wanted = without_repeats(requests_of(task, versions_of(str(dataset), task), sampled=[AS_IS]))
    assert backend.recording.head.rows == len(wanted) == sum(model.asked.values())
    assert all(backend.complete(request).text.startswith("Reply to ") for request in wanted.values())
