"""Slots and service time inferred from a probe, on real servers and from records with known times."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing

import pytest

from query_mutator.llm.ollama import OllamaBackend
from query_mutator.llm.openai import OpenAIBackend
from query_mutator.llm.probe import Probe, infer_slots, measure_calls, slots_advice
from query_mutator.testing import FaultPlan, start_server
from query_mutator.types import Completion
from tests.patience import measured


@pytest.mark.parametrize("kind", [OllamaBackend, OpenAIBackend])
@pytest.mark.parametrize("slots", [1, 3, 8, 16])
def test_a_probe_finds_the_servers_slots_up_to_its_width(kind: type[OllamaBackend | OpenAIBackend], slots: int) -> None:
    def probe(latency_ms: float) -> Probe:
        with start_server({}, num_parallel=slots, latency_ms=latency_ms) as server:
            backend = kind(server.url, timeout_s=20.0)
            found = measure_calls(backend, [backend], "echo", width=8)
            backend.close()
            assert server.stats()["calls"] == 10
        assert found.service_s is not None
        assert found.service_s > 0.9 * latency_ms / 1000
        return found

    assert measured(probe, lambda found: found.slots == min(slots, 8)).slots == min(slots, 8)


class OneProcessor:
    """A model whose replies take as long as those next to them together."""

    def reply_many(self, prompts: Sequence[str]) -> list[str]:
        time.sleep(0.03 * len(prompts))
        return ["word " * 400] * len(prompts)


class Reporting(OllamaBackend):
    """A server that reports its slots."""

    def slots(self, model: str) -> int:
        return 4


def test_slots_that_a_server_reports_are_filled_to_time_a_call() -> None:
    with start_server({"slow": OneProcessor()}, num_parallel=4) as server, closing(Reporting(server.url)) as backend:
        probe = measure_calls(backend, [backend], "slow", width=8)
        assert server.stats()["calls"] == 2 + 4
    assert (probe.slots, probe.width) == (4, None)
    assert probe.service_s is not None
    assert probe.service_s > 0.06  # alone 0.03 s


def answer(*, wait_s: float, service_s: float = 1.0) -> Completion:
    return Completion(text="1", total_s=wait_s + service_s, eval_s=service_s, latency_s=wait_s + service_s)


def test_calls_that_waited_less_than_half_a_call_had_a_slot() -> None:
    waits_s = [0.0, 0.1, 0.9, 1.0, 1.1, 1.9, 2.0, 2.1]
    together = [answer(wait_s=wait_s) for wait_s in waits_s]
    assert infer_slots(together, alone=answer(wait_s=0.0)) == 2
    assert infer_slots([answer(wait_s=9.0)] * 4, alone=answer(wait_s=0.0)) == 1  # somebody else's calls were before us


def test_calls_that_are_over_at_once_tell_nothing() -> None:
    short = answer(wait_s=0.0, service_s=0.0001)
    assert infer_slots([short] * 8, alone=short) is None


def test_a_server_that_fails_is_not_guessed_about() -> None:
    with start_server({}, faults=FaultPlan(1.0, kinds=("500",))) as server:
        backend = OllamaBackend(server.url)
        probe = measure_calls(backend, [backend], "echo")
        backend.close()
    assert probe.slots is None
    assert probe.error is not None
    assert probe.error.kind == "server"


def test_a_server_too_slow_for_the_budget_is_asked_twice_and_no_more() -> None:
    with start_server({}, latency_ms=50) as server:
        backend = OllamaBackend(server.url)
        probe = measure_calls(backend, [backend], "echo", budget_s=0.01)
        backend.close()
        assert server.stats()["calls"] == 2
    assert (probe.slots, probe.error) == (None, None)


@pytest.mark.parametrize(
    ("slots", "batch_size", "advice"),
    [
        (1, 8, "server answers about 1 call at a time: OLLAMA_NUM_PARALLEL=8 ollama serve"),
        (4, 16, "server answers about 4 calls at a time: OLLAMA_NUM_PARALLEL=16 ollama serve"),
        (8, 8, None),
        (None, 8, None),
    ],
)
def test_advice_is_given_where_more_slots_would_help(slots: int | None, batch_size: int, advice: str | None) -> None:
    given = slots_advice(slots, batch_size, server=OllamaBackend)
    assert given is None if advice is None else given is not None and given.startswith(advice)


def test_one_slot_is_said_to_make_batching_useless() -> None:
    assert "batching cannot help" in str(slots_advice(1, 8, server=OllamaBackend))
    assert "llama-server --parallel" in str(slots_advice(1, 8, server=OpenAIBackend))
    assert "until then" not in str(slots_advice(1, 8, server=OpenAIBackend))  # a guess, from the time of calls alone
    assert "batching cannot help" in str(slots_advice(1, 8, server=OpenAIBackend, is_reported=True))
    assert "more than 4 at once only wait" in str(slots_advice(4, 8, server=OpenAIBackend, is_reported=True))
