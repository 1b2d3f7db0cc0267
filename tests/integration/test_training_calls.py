"""How a run makes its calls: several servers, one of which dies, faults, a cache, shared models, no leaks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ollama
import pytest

from query_mutator.commands.main import main as qm
from query_mutator.llm.client import Client
from query_mutator.llm.stack import build_client
from query_mutator.testing import StubServer, start_server
from query_mutator.types import ChatRequest, Completion
from tests.conftest import Librarian, Softener, Upper
from tests.integration.training_runs import train
from tests.patience import measured


@pytest.fixture
def server() -> Iterator[StubServer]:
    with start_server([Librarian(), Softener()], num_parallel=8) as running:
        yield running


@pytest.fixture
def flags(tiny_flags: list[str]) -> list[str]:
    return [*tiny_flags[2:], "--seed", "3"]


def test_second_evaluation_of_a_checkpoint_makes_no_call(flags: list[str], server: StubServer, tmp_path: Path) -> None:
    assert train(*flags, "--ollama-url", server.url, "--no-evaluate", "--eval-interval", "0") == 0
    reports = []
    for name in ("a", "b"):
        before = server.stats()["calls"]
        argv = ["eval", "--checkpoint", str(tmp_path / "runs" / "latest"), "--json", str(tmp_path / name)]
        argv += ["--ollama-url", server.url]
        assert qm(argv) == 0
        report = json.loads((tmp_path / name).read_text())
        del report["plan_search"]["seconds"]
        reports.append((report, server.stats()["calls"] - before))
    (first, paid), (second, paid_again) = reports
    assert paid > 0
    assert paid_again == 0
    assert first == second


def test_server_with_one_slot_is_told_what_to_set(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    def trained(latency_ms: float) -> str:
        with start_server([Librarian(), Softener()], num_parallel=1, latency_ms=latency_ms) as slow:
            one_model = ["--mutator-model", "librarian"]  # slots are a model's own
            assert train(*flags, *one_model, "--ollama-url", slow.url, "--no-evaluate", "--eval-interval", "0") == 0
        return capsys.readouterr().err

    advice = "server answers about 1 call at a time: OLLAMA_NUM_PARALLEL=4 ollama serve"
    error = measured(trained, lambda error: error.count(advice) == 1)
    assert error.count(advice) == 1
    assert "batching cannot help" in error


def test_calls_of_training_on_a_live_model_are_cached(flags: list[str], server: StubServer) -> None:
    flags = [*flags, "--no-evaluate", "--eval-interval", "0", "--deterministic", "--cache", "auto"]
    made = []
    for _ in range(2):
        assert train(*flags, "--openai-url", server.url) == 0
        made.append(server.stats()["calls"])
    assert 0 < made[0] == made[1]


def requests(count: int, **fields: object) -> list[ChatRequest]:
    return [ChatRequest.user(f"question {number}", model="upper", **fields) for number in range(count)]


def ask_all(client: Client, wanted: Sequence[ChatRequest], *, threads: int = 8) -> list[Completion]:
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(client.complete, wanted))


def test_mutator_target_and_judge_calls_to_one_model_load_it_once() -> None:
    with start_server([Upper()], num_parallel=4, load_ms=20) as server:
        stack = build_client(server.url, num_ctx=2048, keep_alive="45m")
        for purpose in ("mutate", "target", "judge"):
            fields = {"purpose": purpose, "options": {"num_ctx": 512, "top_p": 0.5}}  # the run's num_ctx wins
            assert all(reply.ok for reply in ask_all(stack.client, requests(4, **fields)))
        running = {model.model: model for model in ollama.Client(host=server.url).ps().models}
        loads = server.stats()["loads"]
        stack.close()
    assert loads == 1
    assert running["upper:latest"].context_length == 2048
