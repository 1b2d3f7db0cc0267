"""Several servers as one: who gets the next call, what happens when one fails, and which models may be pooled."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from query_mutator.encoder import resolve_encoder
from query_mutator.errors import ModelMissingError, UsageError
from query_mutator.llm.ollama import OllamaBackend
from query_mutator.llm.pool import Pool, Server, pick, require_same_models
from query_mutator.testing import Echo, start_server
from query_mutator.types import ChatRequest, Completion, ErrorInfo

REQUEST = ChatRequest.user("why?", model="echo")


@pytest.mark.parametrize(
    ("in_flight", "call_s", "last_used", "chosen"),
    [
        ([2, 1, 3], [None, None, None], [1, 2, 3], 1),  # fewest in flight
        ([1, 1], [None, None], [5, 4], 1),  # a tie: the one used longest ago
        ([3, 1], [0.1, 1.0], [1, 2], 0),  # ten times slower weighs more than two calls
        ([2, 1], [0.1, 0.14], [1, 2], 1),  # a difference that chance makes does not count
        ([2, 1], [0.1, None], [1, 2], 1),  # unknown speed: as fast as any
    ],
)
def test_the_next_call_goes_where_it_is_done_soonest(
    in_flight: list[int], call_s: list[float | None], last_used: list[int], chosen: int
) -> None:
    assert pick(in_flight, call_s, last_used) == chosen


class Scripted:
    """A backend that answers as scripted, and notes how often it was asked."""

    def __init__(self, *kinds: str | None) -> None:
        self.url = "scripted"
        self.kinds = list(kinds)
        self.asked = 0
        self.closed = False

    def __repr__(self) -> str:
        return "Scripted()"

    def complete(self, request: ChatRequest) -> Completion:
        kind = self.kinds[min(self.asked, len(self.kinds) - 1)]
        self.asked += 1
        return Completion(text="ok") if kind is None else Completion.failed(kind, "scripted")

    def embed(self, model: str, texts: Sequence[str]) -> Any:
        return ErrorInfo(kind="connect", message="scripted")

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("kind", ["connect", "busy", "memory"])
def test_a_call_that_was_not_taken_goes_to_the_next_server_at_once(kind: str) -> None:
    bad, good = Scripted(kind), Scripted(None)
    assert Pool([bad, good]).complete(REQUEST).ok
    assert (bad.asked, good.asked) == (1, 1)


@pytest.mark.parametrize("kind", ["timeout", "request", "empty", "server"])
def test_a_call_that_was_taken_is_not_made_twice(kind: str) -> None:
    bad, good = Scripted(kind), Scripted(None)
    reply = Pool([bad, good]).complete(REQUEST)
    assert reply.error is not None
    assert (reply.error.kind, good.asked) == (kind, 0)


def test_the_last_failure_is_returned_when_no_server_takes_the_call() -> None:
    reply = Pool([Scripted("connect"), Scripted("busy")]).complete(REQUEST)
    assert reply.error is not None
    assert reply.error.kind == "busy"


def test_a_breaker_opens_lets_one_through_and_closes_on_its_answer() -> None:
    server = Server(Scripted(None))
    server.failed("connect", 100.0)
    assert [server.is_available(now) for now in (100.0, 100.9, 101.1)] == [False, False, True]
    server.in_flight = 1  # the one that tries
    assert not server.is_available(101.1)
    server.in_flight = 0
    server.failed("connect", 101.1)  # twice as long this time
    assert [server.is_available(now) for now in (102.9, 103.2)] == [False, True]
    server.answered(0.1)
    assert server.is_available(103.2)
    assert (server.failures, server.breaks) == (0, 0)


def test_a_breaker_takes_three_failures_in_a_row_of_a_server_that_can_be_reached() -> None:
    server = Server(Scripted(None))
    for kind in ("server", "timeout", "request", "server", "server"):
        server.failed(kind, 0.0)
    assert server.is_available(0.0)
    server.failed("malformed", 50.0)
    assert not server.is_available(50.5)


def test_a_server_that_fails_is_left_alone_and_asked_again_later() -> None:
    now = [100.0]
    flaky, good = Scripted("connect", None), Scripted(None)
    pool = Pool([flaky, good], clock=lambda: now[0])
    for _ in range(10):
        assert pool.complete(REQUEST).ok
    assert flaky.asked == 1
    now[0] = 101.5
    for _ in range(10):
        assert pool.complete(REQUEST).ok
    assert flaky.asked == 6


def test_with_all_breakers_open_a_call_is_tried_all_the_same() -> None:
    first, second = Scripted("connect", "connect", None), Scripted("connect")
    pool = Pool([first, second])
    assert not pool.complete(REQUEST).ok
    assert not pool.complete(REQUEST).ok
    assert pool.complete(REQUEST).ok


def test_close_closes_every_server_and_repr_prints_the_nesting() -> None:
    backends = [Scripted(None), Scripted(None)]
    pool = Pool(backends)
    pool.close()
    assert all(backend.closed for backend in backends)
    assert repr(pool) == "Pool([Scripted(), Scripted()])"
    with pytest.raises(ValueError, match="at least one server"):
        Pool([])


def test_calls_are_spread_evenly_over_equal_servers() -> None:
    with start_server({}, num_parallel=8) as one, start_server({}, num_parallel=8) as other:
        pool = Pool([OllamaBackend(one.url), OllamaBackend(other.url)])
        with ThreadPoolExecutor(8) as threads:
            assert all(reply.ok for reply in threads.map(pool.complete, [REQUEST] * 200))
        pool.close()
        assert [60 <= server.stats()["calls"] <= 140 for server in (one, other)] == [True, True]


def test_embeddings_fail_over_too() -> None:
    with start_server({}, encoder=resolve_encoder("hash")) as server:
        pool = Pool([Scripted(None), OllamaBackend(server.url)])
        rows = pool.embed("all-minilm", ["a text"])
        pool.close()
    assert isinstance(rows, np.ndarray)


class Other(Echo):
    """The same name, other weights."""


def test_models_of_one_name_must_have_one_digest_unless_mixing_is_allowed() -> None:
    with start_server({}) as one, start_server({"echo": Other()}) as other:
        servers = [OllamaBackend(one.url), OllamaBackend(other.url)]
        require_same_models([servers[0], servers[0]], ["echo"])
        with pytest.raises(UsageError, match=rf"echo is not the same.*{other.url} has [0-9a-f]{{12}}.*--allow-mixed"):
            require_same_models(servers, ["echo"])
        require_same_models(servers, ["echo"], allow_mixed=True)
        with pytest.raises(ModelMissingError, match="ollama pull elsewhere"):
            require_same_models(servers, ["elsewhere"], allow_mixed=True)
        for server in servers:
            server.close()
