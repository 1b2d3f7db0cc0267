"""Prompts that do not fit and replies that are cut are said; no held-out question is read before the end."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from aiohttp.web import Request

from query_mutator.cli.console import exit_code
from query_mutator.data import load_questions, split_questions
from query_mutator.data.loaders import general
from query_mutator.testing import StubServer, routes, start_server
from tests.conftest import Librarian, Softener
from tests.integration.conftest import EVERY_STEP
from train_query_mutator import main

HELD_OUT = [question.text for question in split_questions(general()).test]


def summary(runs: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((runs / "latest" / "summary.json").read_text())
    return found


def test_a_run_whose_replies_end_by_themselves_says_nothing_of_limits(
    tiny_flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(tiny_flags) == 0
    found = summary(tmp_path / "runs")
    assert (found["cut_replies"], found["prompts_too_long"]) == (0, {})
    said = capsys.readouterr().err
    assert "token limit" not in said
    assert "context" not in said


@pytest.fixture(autouse=True)
def no_known_embeddings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what gathers every text in every request to a server."""
    texts: list[str] = []
    read = routes._payload

    async def record(request: Request) -> dict[str, Any]:
        payload = await read(request)
        texts.extend(strings(payload))
        return payload

    monkeypatch.setattr(routes, "_payload", record)
    return texts


@pytest.fixture
def server() -> Iterator[StubServer]:
    with start_server([Librarian(), Softener()], num_parallel=8) as running:
        yield running


def strings(value: Any) -> Iterator[str]:
    """Yield the texts in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from strings(item)


def sent(questions: Sequence[str], received: Sequence[str]) -> list[str]:
    """Return those of the questions that any request has."""
    return [question for question in questions if any(question in text for text in received)]


def train(server: StubServer, folder: Path, *flags: str) -> Path:
    """Make a run of two updates on the bundled questions, with three periodic evaluations; return its folder."""
    argv = [
        *("--ollama-url", server.url, "--target-model", "librarian", "--mutator-model", "softener"),
        *("--encoder", "hash", "--operators", "spelling,neutral,filler", "--cache", "off"),
        *("--num-processes", "4", "--num-steps", "8", "--num-mini-batch", "2", "--num-env-steps", "64"),
        *("--eval-interval", "1", "--eval-questions", "20", "--save-dir", str(folder / "runs"), *flags),
    ]
    assert exit_code(main, argv, prog="train") == 0
    return (folder / "runs" / "latest").resolve()


def test_a_long_question_is_named_when_it_is_asked_and_a_held_out_one_is_not_sent(
    tiny_flags: list[str],
    tiny_server: StubServer,
    received: list[str],
    dataset: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    split = split_questions(load_questions(dataset))
    long, more = (split.train[0], split.test[0]), " and then" * 1000
    text = dataset.read_text()
    for question in long:
        text = text.replace(question.text, question.text + more)
    dataset.write_text(text)
    flags = [*tiny_flags, *EVERY_STEP, "--num-ctx", "1024", "--max-failure-rate", "1"]
    assert exit_code(main, [*flags, "--no-evaluate"], prog="train") == 0
    err = capsys.readouterr().err
    named = [f"question {question.id}: its prompt does not fit" in err for question in long]
    assert named == [sent([question.text + more], received) != [] for question in long] == [True, False]
