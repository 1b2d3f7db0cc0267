"""Equal requests in flight share one call, in threads that wait and for a scheduler that does not."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from query_mutator.llm.coalesce import Coalesce, is_repeatable, join, request_key
from query_mutator.llm.limit import Limit
from query_mutator.llm.ollama import OllamaBackend
from query_mutator.testing import start_server
from query_mutator.types import ChatRequest, Completion, Message

REQUEST = ChatRequest.user("why?", model="m")


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
        [(reply.text, 0, 0.0)] * 3 + [(reply.text, 1, reply.eval_s)]
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
