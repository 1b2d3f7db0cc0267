"""The rule of the limit that moves, and the limit against servers with more and with fewer slots."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from query_mutator.llm.limit import AdaptiveLimit, next_limit
from query_mutator.llm.ollama import OllamaBackend
from query_mutator.testing import start_server
from query_mutator.types import ChatRequest, Completion

REQUEST = ChatRequest.user("why?", model="m")


def test_a_limit_grows_by_one_while_nothing_waits() -> None:
    assert [next_limit(limit, highest=8) for limit in (1, 2, 7, 8)] == [2, 3, 8, 8]


def test_a_limit_that_was_not_reached_stays() -> None:
    assert next_limit(4, was_full=False, highest=8) == 4


@pytest.mark.parametrize(
    ("limit", "wait_ratio", "after"), [(8, 1.0, 4), (6, 0.5, 4), (8, 7.0, 4), (2, 1.0, 1), (1, 9, 1)]
)
def test_a_limit_is_divided_by_what_calls_waited_too_long_at_most_halved(
    limit: int, wait_ratio: float, after: int
) -> None:
    assert next_limit(limit, wait_ratio=wait_ratio, highest=8) == after


def test_overload_halves_down_to_one() -> None:
    assert [next_limit(limit, overloaded=True, highest=8) for limit in (8, 3, 1)] == [4, 1, 1]


class Slots:
    """A client with the times of a server of `slots` slots on which each call works for a second."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.outcome: Callable[[int], Completion] = self.answer
        self.in_flight: Callable[[], int] = lambda: 0

    def answer(self, in_flight: int) -> Completion:
        waited_s = max(0.0, in_flight / self.slots - 1.0)
        return Completion(text="ok", total_s=waited_s + 1.0, eval_s=1.0)

    def complete(self, request: ChatRequest) -> Completion:
        return self.outcome(self.in_flight())

    def close(self) -> None:
        """Nothing is held."""


def course(limit: AdaptiveLimit, server: Slots, rounds: int) -> list[int]:
    """Keep the limit full, one call ending at a time, and return where it stood after each round of calls."""
    server.in_flight = lambda: limit.limit
    stood = []
    for _ in range(rounds):
        for _ in range(limit.limit):
            limit._in_flight = limit.limit - 1  # the other places are taken
            limit.complete(REQUEST)
            limit._in_flight = 0
        stood.append(limit.limit)
    return stood


@pytest.mark.parametrize("slots", [1, 3, 8])
def test_the_limit_finds_the_servers_slots_and_stays_near_them(slots: int) -> None:
    server = Slots(slots)
    late = course(AdaptiveLimit(server, highest=16), server, 60)[20:]
    assert min(late) >= slots - slots // 3
    assert max(late) <= 1.5 * slots + 1


def test_a_server_with_room_keeps_the_highest_limit() -> None:
    server = Slots(64)
    assert set(course(AdaptiveLimit(server, highest=8), server, 10)) == {8}


def test_a_limit_that_was_halved_grows_again_while_it_is_full() -> None:
    server = Slots(64)
    limit = AdaptiveLimit(server, highest=8)
    limit._learn(Completion.failed("busy", "x"), limit._window)
    assert course(limit, server, 6) == [5, 6, 7, 8, 8, 8]


def test_calls_that_fail_together_lower_the_limit_once() -> None:
    server = Slots(8)
    limit = AdaptiveLimit(server, highest=8)
    window = limit._window
    for _ in range(8):
        limit._learn(Completion.failed("busy", "x"), window)
    assert limit.limit == 4


def test_the_limit_comes_down_on_a_real_server_with_one_slot() -> None:
    # Long calls, so that late threads on a busy machine do not matter.
    with start_server({}, num_parallel=1, latency_ms=80) as server:
        backend = OllamaBackend(server.url, timeout_s=20, pool_size=8)
        limit = AdaptiveLimit(backend, highest=8)
        stood: list[int] = []

        def call(number: int) -> None:
            assert limit.complete(ChatRequest.user(f"why {number}?", model="echo")).ok
            stood.append(limit.limit)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(call, range(50)))
        limit.close()
    assert stood[0] == 8
    assert max(stood[-15:]) <= 2
    assert all(after - before <= 1 for before, after in itertools.pairwise(stood[20:]))


def test_repr_prints_the_nesting() -> None:
    with start_server({}) as server:
        assert repr(AdaptiveLimit(OllamaBackend(server.url), highest=2)) == f"AdaptiveLimit(Ollama('{server.url}'))"
