"""Slots and service time inferred from a probe; equal requests in flight share one call."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace

import pytest

from query_mutator.llm.coalesce import Coalesce, is_repeatable, join, request_key
from query_mutator.llm.limit import Limit
from query_mutator.llm.ollama import OllamaBackend
from query_mutator.llm.openai import OpenAIBackend
from query_mutator.llm.probe import Probe, infer_slots, measure_calls, slots_advice
from query_mutator.testing import FaultPlan, start_server
from query_mutator.types import ChatRequest, Completion, Message
from tests.patience import measured

REQUEST = ChatRequest.user("why?", model="m")


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


def varied() -> list[ChatRequest]:
    """Requests that differ from REQUEST in one thing each."""
    return [
        ChatRequest.user("why not?", model="m"),
        ChatRequest.user("why?", model="n"),
        ChatRequest(messages=(Message(role="system", content="why?"),), model="m"),
        *[
            ChatRequest.user("why?", model="m", **{name: value})
            for name, value in {
                "max_tokens": 7,
                "temperature": 0.5,
                "seed": 1,
                "sample": 1,
                "options": {"top_p": 0.5},
            }.items()
        ],
    ]


def test_a_key_depends_on_all_that_decides_a_reply_and_on_nothing_else() -> None:
    keys = {request_key(request) for request in [REQUEST, *varied()]}
    assert len(keys) == 9
    forms = [{"choices": ("yes", "no")}, {"json_schema": {}}, {"json_schema": {}, "think": True}, {"logprobs": True}]
    keys |= {request_key(replace(REQUEST, **form)) for form in forms}  # type: ignore[arg-type]
    assert len(keys) == 13
    assert request_key(ChatRequest.user("why?", model="m", purpose="mutate")) == request_key(REQUEST)
    assert request_key(REQUEST, identity="other weights") != request_key(REQUEST)


def test_a_key_is_the_sha256_of_a_json_list_as_it_always_was() -> None:
    signs = ChatRequest.user(
        '"quoted", [bracketed] \\ \n \u2028 é 😀 \ud83d', model='m", "', temperature=0, options={"b": 1, "a": "é"}
    )
    for request in [REQUEST, *varied(), signs, replace(signs, temperature=0.0)]:
        parts = [
            request.model,
            [[message.role, message.content] for message in request.messages],
            *(request.max_tokens, request.temperature, request.seed, request.sample),
            dict(request.options),
        ]
        assert request_key(request) == hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def test_a_random_reply_is_repeatable_only_when_a_draw_is_named() -> None:
    assert is_repeatable(REQUEST)
    assert not is_repeatable(ChatRequest.user("why?", model="m", temperature=0.7))
    assert is_repeatable(ChatRequest.user("why?", model="m", temperature=0.7, seed=3))
    assert is_repeatable(ChatRequest.user("why?", model="m", temperature=0.7, sample=0))


class Gate:
    """A client whose calls wait at a gate."""

    def __init__(self, reply: Completion) -> None:
        self.reply = reply
        self.entered = threading.Semaphore(0)
        self.open = threading.Event()
        self.calls = 0

    def __repr__(self) -> str:
        return "Gate()"

    def complete(self, request: ChatRequest) -> Completion:
        self.calls += 1
        self.entered.release()
        self.open.wait(10)
        return self.reply

    def close(self) -> None:
        self.open.set()


@pytest.mark.parametrize("reply", [Completion(text="because", eval_s=2.0), Completion.failed("server", "x")])
def test_followers_get_the_leaders_outcome_at_no_cost(reply: Completion) -> None:
    gate = Gate(reply)
    coalesce = Coalesce(gate)
    got: list[Completion] = []
    work = coalesce.join(REQUEST, got.append)
    assert work is not None
    assert [coalesce.join(REQUEST, got.append) for _ in range(3)] == [None] * 3
    gate.open.set()
    work()
    assert (gate.calls, coalesce.shared) == (1, 3)
    assert sorted((each.text, each.attempts, each.eval_s) for each in got) == sorted(
        [(reply.text, 0, reply.eval_s)] * 3 + [(reply.text, 1, reply.eval_s)]
    )
    assert all(each.error == reply.error for each in got)


def test_after_the_call_an_equal_request_is_a_new_one() -> None:
    gate = Gate(Completion(text="because"))
    gate.open.set()
    coalesce = Coalesce(gate)
    assert [coalesce.complete(REQUEST).attempts for _ in range(2)] == [1, 1]
    assert (gate.calls, coalesce.shared) == (2, 0)


def test_random_requests_are_never_shared() -> None:
    coalesce = Coalesce(Gate(Completion(text="because")))
    random = ChatRequest.user("why?", model="m", temperature=0.7)
    assert all(coalesce.join(random, print) is not None for _ in range(3))


def test_threads_that_wait_for_a_twin_hold_no_place_of_the_limit() -> None:
    gate = Gate(Completion(text="because"))
    coalesce = Coalesce(Limit(gate, limit=2))
    other = ChatRequest.user("how?", model="m")
    with ThreadPoolExecutor(6) as pool:
        twins = [pool.submit(coalesce.complete, REQUEST) for _ in range(5)]
        assert gate.entered.acquire(timeout=10)
        single = pool.submit(coalesce.complete, other)
        assert gate.entered.acquire(timeout=10)  # the second place is free although four threads wait
        gate.open.set()
        assert all(call.result(10).ok for call in [*twins, single])
    assert gate.calls == 2 or coalesce.shared < 4


class Broken(Gate):
    def complete(self, request: ChatRequest) -> Completion:
        raise KeyboardInterrupt


def test_a_leader_that_is_torn_away_leaves_nobody_waiting() -> None:
    coalesce = Coalesce(Broken(Completion()))
    got: list[Completion] = []
    work = coalesce.join(REQUEST, got.append)
    assert coalesce.join(REQUEST, got.append) is None
    assert work is not None
    with pytest.raises(KeyboardInterrupt):
        work()
    assert [reply.error.kind for reply in got if reply.error] == ["cancelled"]


def test_a_client_that_cannot_join_just_calls() -> None:
    gate = Gate(Completion(text="because"))
    gate.open.set()
    got: list[Completion] = []
    work = join(gate, REQUEST, got.append)
    assert work is not None
    work()
    assert got == [Completion(text="because")]


class Slow:
    """Counts prompts; all that come while one is worked on are answered together by the server."""

    name = "slow"

    def __init__(self) -> None:
        self.prompts: list[str] = []

    def reply_many(self, prompts: Sequence[str]) -> list[str]:
        self.prompts += prompts
        return [prompt.upper() for prompt in prompts]


def test_over_http_a_burst_of_equal_requests_is_few_calls() -> None:
    model = Slow()
    with start_server([model], num_parallel=16, latency_ms=100) as server:
        coalesce = Coalesce(OllamaBackend(server.url))
        with ThreadPoolExecutor(16) as pool:
            replies = list(pool.map(coalesce.complete, [ChatRequest.user("why?", model="slow")] * 16))
        coalesce.close()
    assert [reply.text for reply in replies] == ["WHY?"] * 16
    assert len(model.prompts) == 16 - coalesce.shared
