"""Runs against a server that fails: every step is accounted for, nothing is made up, and enough is enough."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from query_mutator.cli.console import exit_code
from query_mutator.encoder import resolve_encoder
from query_mutator.files.json_lines import read_json_lines
from query_mutator.session.checkpoint import read_checkpoint
from query_mutator.testing import KINDS, FaultPlan, StubServer, start_server
from query_mutator.types import FloatArray
from tests.conftest import Librarian, Softener
from tests.integration.killing import kill_when, run_in, start, train, transcript, weights
from train_query_mutator import main

Serve = Callable[..., StubServer]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start servers with the tiny models; all end with the test."""
    running: list[StubServer] = []

    def begin(share: float, *, kinds: Sequence[str] = KINDS, **settings: object) -> StubServer:
        faults = FaultPlan(share, kinds=kinds, seed=2) if share else None
        server = start_server(
            [Librarian(), Softener()],
            encoder=resolve_encoder("hash"),
            num_parallel=64,
            faults=faults,
            **settings,  # type: ignore[arg-type]
        )
        running.append(server)
        return server

    yield begin
    for server in running:
        server.close()


@pytest.fixture
def flags(tiny_flags: list[str], tmp_path: Path) -> list[str]:
    flags = [*tiny_flags[2:], "--no-evaluate", "--eval-interval", "0", "--timeout", "0.3", "--deterministic"]
    return [*flags, "--cache", "off", "--num-processes", "16", "--batch-size", "16", "--num-env-steps", "256"]


def test_every_step_is_accounted_for_under_faults_of_every_kind(flags: list[str], serve: Serve, tmp_path: Path) -> None:
    server = serve(0.3)
    assert exit_code(main, [*flags, "--ollama-url", server.url], prog="train") == 0
    rows = transcript((tmp_path / "runs" / "latest").resolve())
    assert len(rows) == 256
    assert len(server.stats()["faults"]) >= 5  # of seven; few different questions are asked here
    invalid = [row for row in rows if not row["valid"]]
    assert all(row["error"] is not None and row["reward"] == 0 for row in invalid)
    assert all(row["error"] is None for row in rows if row["valid"])
    last = list(read_json_lines(tmp_path / "runs" / "latest" / "metrics.jsonl"))[-1]
    assert last["llm/invalid_steps"] == len(invalid)
    # A failure that several requests share may be retried by each of them.
    assert 0 < last["llm/retries"] <= last["llm/failed_calls"] + last["llm/shared_calls"]


@pytest.mark.slow
def test_killed_under_faults_ends_as_one_that_was_not(flags: list[str], serve: Serve, tmp_path: Path) -> None:
    # Without stalls: a time-out long enough for a busy machine would make them long.
    server = serve(0.2, kinds=("500", "503", "reset", "cut", "empty", "incomplete"), latency_ms=2)
    flags = [*flags, "--ollama-url", server.url, "--save-interval", "1", "--timeout", "60", "--num-steps", "2"]
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    train([*flags, "--save-dir", str(tmp_path / "whole")], tmp_path / "whole")
    served = server.stats()["requests"]
    argv = [*flags, "--save-dir", str(tmp_path / "killed")]
    for share in (0.2, 0.4, 0.6):
        moment = (1 + share) * served
        assert kill_when(start(argv, tmp_path / "killed"), lambda: server.stats()["requests"] > moment)  # noqa: B023
        argv = ["--resume", str(run_in(tmp_path / "killed"))]
    train(argv, tmp_path / "killed")
    whole, killed = (tmp_path / name / "latest" for name in ("whole", "killed"))
    assert transcript(killed) == transcript(whole)
    assert all(torch.equal(tensor, weights(whole)[name]) for name, tensor in weights(killed).items())


def test_too_many_failures_leave_a_checkpoint_and_exit_code_three(
    flags: list[str], serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = serve(0.4)
    argv = [*flags, "--ollama-url", server.url, "--max-retries", "0", "--num-env-steps", "4096"]
    assert exit_code(main, argv, prog="train") == 3
    error = capsys.readouterr().err
    assert "calls failed" in error or "answered no question" in error
    run = (tmp_path / "runs" / "latest").resolve()
    assert f"continue with --resume {run}" in error
    assert read_checkpoint(run).actions


@pytest.mark.parametrize("wait_s", ["0", "0.5"])
def test_server_that_goes_away_for_good_ends_the_run_with_exit_code_three(
    wait_s: str, flags: list[str], serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = serve(0.0, latency_ms=2)
    end = threading.Thread(target=lambda: (wait_for(lambda: server.stats()["calls"] > 100), server.close()))
    end.start()
    argv = [*flags, "--ollama-url", server.url, "--max-retries", "0", "--num-env-steps", "4096"]
    argv += ["--timeout", "60"]  # nothing stalls
    assert exit_code(main, [*argv, "--wait-for-server", wait_s], prog="train") == 3
    end.join()
    assert "connect" in capsys.readouterr().err


def test_embeddings_that_fail_for_good_make_a_step_invalid(flags: list[str], tmp_path: Path) -> None:
    with start_server([Librarian(), Softener()], encoder=FaultyEmbeddings(), num_parallel=64) as server:
        argv = [*flags, "--ollama-url", server.url, "--encoder", "ollama:all-minilm", "--max-retries", "0"]
        argv += ["--timeout", "60", "--max-failure-rate", "1", "--no-use-linear-lr-decay"]  # nothing stalls
        assert exit_code(main, argv, prog="train") == 0
        run = (tmp_path / "runs" / "latest").resolve()
        before = read_checkpoint(run).progress.invalid_steps
        for resumed in (run / "checkpoints" / "step_256.pt", run):
            assert exit_code(main, ["--resume", str(resumed), "--num-env-steps", "384"], prog="train") == 0
    new = (tmp_path / "runs" / "latest").resolve()
    for folder, steps, earlier in ((run, 384, 0), (new, 128, before)):
        rows = transcript(folder)
        invalid = [row for row in rows if not row["valid"]]
        assert len(rows) == steps
        assert 0 < before < len(invalid) + earlier
        assert list(read_json_lines(folder / "metrics.jsonl"))[-1]["llm/invalid_steps"] == len(invalid) + earlier
        assert all("no embeddings" in row["error"]["message"] for row in invalid)


class FaultyEmbeddings:
    """An encoder that cannot encode what became of "kill" questions."""

    def __init__(self) -> None:
        self._inner = resolve_encoder("hash")
        self.name, self.dim, self.source = self._inner.name, self._inner.dim, self._inner.source
        self.fingerprint = self._inner.fingerprint

    def encode(self, texts: Sequence[str]) -> FloatArray:
        if any("stop" in text for text in texts):
            raise RuntimeError("no answer to that")
        return self._inner.encode(texts)

    def close(self) -> None:
        self._inner.close()


def wait_for(condition: Callable[[], bool]) -> None:
    pause = threading.Event()
    while not condition():
        pause.wait(0.002)
