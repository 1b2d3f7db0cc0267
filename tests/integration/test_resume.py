"""A run that is killed and resumed ends like an uninterrupted one, and no call is made twice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from query_mutator.session.checkpoint import read_checkpoint
from query_mutator.testing import StubServer, start_server
from tests.conftest import Librarian, Softener
from tests.integration.killing import kill_when, run_in, start, train, transcript

BATCH_SIZE = 4


@pytest.fixture
def server() -> Iterator[StubServer]:
    with start_server([Librarian(), Softener()], num_parallel=8, latency_ms=4, latency_sigma=1.0) as running:
        yield running


@pytest.fixture
def flags(tiny_flags: list[str], server: StubServer, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Flags of a run of eight updates, with a checkpoint after every third."""
    monkeypatch.setenv("OLLAMA_HOST", server.url)
    return [
        *tiny_flags[2:],
        *("--ollama-url", server.url, "--deterministic", "--eval-interval", "0", "--no-evaluate", "--seed", "7"),
        *("--num-env-steps", "256", "--save-interval", "3"),
    ]


def calls_of(run: Path) -> int:
    return read_checkpoint(run).progress.totals.calls


def test_what_was_paid_is_not_asked_again_without_deterministic_either(
    flags: list[str], server: StubServer, tmp_path: Path
) -> None:
    flags = [word for word in flags if word != "--deterministic"]
    argv = [*flags, "--save-interval", "100", "--save-dir", str(tmp_path)]
    assert kill_when(start(argv, tmp_path), lambda: server.stats()["calls"] >= 24)
    run = run_in(tmp_path)
    train(["--resume", str(run), "--ollama-url", server.url], tmp_path)
    assert len(transcript(run)) == 256
    assert 0 <= server.stats()["calls"] - calls_of(run) <= BATCH_SIZE
