"""How a training run makes its calls: several servers, a cache, a lag, a server with one slot, nothing left behind."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from query_mutator.cli.console import exit_code
from query_mutator.commands.main import main as qm
from query_mutator.files.json_lines import read_json_lines
from query_mutator.testing import StubServer, start_server
from tests.conftest import Librarian, Softener
from tests.integration.raw_http import until
from train_query_mutator import main


@pytest.fixture
def server() -> Iterator[StubServer]:
    with start_server([Librarian(), Softener()], num_parallel=8) as running:
        yield running


@pytest.fixture
def flags(tiny_flags: list[str]) -> list[str]:
    return [*tiny_flags[2:], "--seed", "3"]


def train(*flags: str) -> None:
    assert exit_code(main, flags, prog="train") == 0


def last_row(tmp_path: Path) -> dict[str, float]:
    return list(read_json_lines(tmp_path / "runs" / "latest" / "metrics.jsonl"))[-1]


def test_deterministic_run_with_everything_remembered_makes_no_call_again(
    flags: list[str], server: StubServer, tmp_path: Path
) -> None:
    flags = [*flags, "--ollama-url", server.url, "--deterministic", "--cache", "all"]
    train(*flags)
    calls = server.stats()["calls"]
    assert calls > 0
    train(*flags)
    assert server.stats()["calls"] == calls
    assert (last_row(tmp_path)["llm/calls"], last_row(tmp_path)["llm/cache_hits"] > 0) == (0, True)


def test_second_evaluation_of_a_checkpoint_makes_no_call(flags: list[str], server: StubServer, tmp_path: Path) -> None:
    train(*flags, "--ollama-url", server.url, "--no-evaluate", "--eval-interval", "0")
    reports = []
    for name in ("a", "b"):
        before = server.stats()["calls"]
        argv = ["eval", "--checkpoint", str(tmp_path / "runs" / "latest"), "--json", str(tmp_path / name)]
        assert qm(argv) == 0
        report = json.loads((tmp_path / name).read_text())
        del report["plan_search"]["seconds"]
        reports.append((report, server.stats()["calls"] - before))
    (first, paid), (second, paid_again) = reports
    assert paid > 0
    assert paid_again == 0
    assert first == second


def test_two_servers_share_a_run_and_an_openai_server_serves_one(
    flags: list[str], server: StubServer, tmp_path: Path
) -> None:
    with start_server([Librarian(), Softener()], num_parallel=8) as other:
        train(*flags, "--ollama-url", server.url, "--ollama-url", other.url, "--no-evaluate")
        assert min(server.stats()["calls"], other.stats()["calls"]) > 10
    train(*flags, "--backend", "openai", "--openai-url", server.url, "--no-evaluate")
    assert server.stats()["routes"]["/v1/chat/completions"] > 10


def test_server_with_one_slot_is_told_what_to_set(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with start_server([Librarian(), Softener()], num_parallel=1, latency_ms=10) as slow:
        one_model = ["--mutator-model", "librarian"]  # slots are a model's own
        train(*flags, *one_model, "--ollama-url", slow.url, "--no-evaluate", "--eval-interval", "0")
    error = capsys.readouterr().err
    assert error.count("server answers about 1 call at a time: OLLAMA_NUM_PARALLEL=4 ollama serve") == 1
    assert "batching cannot help" in error


def test_early_stop_and_adaptive_limit_are_logged(flags: list[str], tmp_path: Path) -> None:
    with start_server([Librarian(), Softener()], num_parallel=1, latency_ms=10) as slow:
        one_model = ["--mutator-model", "librarian", "--adaptive", "--early-stop"]
        train(*flags, *one_model, "--ollama-url", slow.url, "--no-evaluate", "--eval-interval", "0")
    row = last_row(tmp_path)
    assert 1 <= row["llm/limit"] < 4
    assert row["llm/tokens_saved"] >= 0


@pytest.mark.slow
def test_runs_leave_no_thread_and_no_file_open(flags: list[str], server: StubServer, tmp_path: Path) -> None:
    def held() -> tuple[int, int]:
        mine = [thread for thread in threading.enumerate() if not thread.name.startswith(("test-server", "model-"))]
        return len(mine), len(os.listdir("/proc/self/fd"))

    train(*flags, "--ollama-url", server.url)  # what is loaded and opened once
    threads, files = held()
    for _ in range(3):
        train(*flags, "--ollama-url", server.url)
    until(lambda: held()[0] <= threads and held()[1] <= files)  # the server sees connections closed a little later


def test_calls_of_training_on_a_live_model_are_cached(flags: list[str], server: StubServer) -> None:
    flags = [*flags, "--no-evaluate", "--eval-interval", "0", "--deterministic", "--cache", "auto"]
    made = []
    for _ in range(2):
        train(*flags, "--openai-url", server.url)
        made.append(server.stats()["calls"])
    assert 0 < made[0] == made[1]
