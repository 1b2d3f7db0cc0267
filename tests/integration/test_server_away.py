"""A server that is killed and comes back: the run waits, and ends as if nothing had happened."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from query_mutator.files import decode, read_json_lines
from tests.integration.killing import ServerProcess, start

BATCH_SIZE = 4
AWAY_S = 1.5


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    process = ServerProcess(tmp_path, num_parallel=8, latency_ms=8)
    yield process
    process.kill()


@pytest.fixture
def flags(tiny_flags: list[str], server: ServerProcess) -> list[str]:
    return [*tiny_flags[2:], "--ollama-url", server.url]


def bars(folder: Path) -> list[str]:
    return (folder / "output.txt").read_text(encoding="utf-8").replace("\r", "\n").splitlines()


def test_a_server_that_is_killed_twice_in_training_and_twice_in_the_evaluation_costs_nothing(
    flags: list[str], server: ServerProcess, tmp_path: Path
) -> None:
    trainer = start([*flags, "--eval-interval", "0", "--num-env-steps", "128"], tmp_path)
    run = tmp_path / "runs" / "latest"

    def wait_for(condition: Callable[[], bool]) -> None:
        while not condition():
            assert trainer.is_alive(), bars(tmp_path)
            time.sleep(0.002)

    def steps() -> int:
        return len(list(read_json_lines(run / "transcripts.jsonl"))) if run.exists() else 0

    moments: list[Callable[[], bool]] = [lambda: steps() >= 20, lambda: steps() >= 70]
    for _ in range(2):  # in the evaluation: all steps are taken, and calls are made
        moments.append(lambda: steps() == 128 and server.answered > after + 20)
    after = 0
    for moment in moments:
        wait_for(moment)
        server.kill()
        time.sleep(AWAY_S)
        after = server.answered
        server.start()
    trainer.join()
    said = bars(tmp_path)
    assert trainer.exitcode == 0, said
    assert sum("server away since" in line for line in said) >= len(moments)
    summary = decode((run / "summary.json").read_bytes())
    assert summary["invalid_steps"] == 0
    assert all(row["valid"] for row in read_json_lines(run / "transcripts.jsonl"))
    repeated = server.answered - summary["llm_calls"] - summary["eval_llm_calls"]
    assert 0 <= repeated <= len(moments) * BATCH_SIZE
