"""The bound on calls in flight, fixed or found."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from query_mutator.llm.client import Client
from query_mutator.llm.coalesce import Coalesce
from query_mutator.llm.limit import AdaptiveLimit, Limit, next_limit
from query_mutator.llm.stack import Counted
from query_mutator.types import ChatRequest, Completion

REQUEST = ChatRequest.user("why?", model="m")


class Gate:
    """A client whose calls wait at a gate; it notes how many are in at once."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.open = threading.Event()
        self.inside = 0
        self.most = 0
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return "Gate()"

    def complete(self, request: ChatRequest) -> Completion:
        with self._lock:
            self.inside += 1
            self.most = max(self.most, self.inside)
        self.entered.release()
        self.open.wait(10)
        with self._lock:
            self.inside -= 1
        return Completion(text="ok")

    def close(self) -> None:
        self.open.set()


def test_other_kinds_of_call_take_places_of_the_same_bound() -> None:
    gate = Gate()
    limit = Limit(gate, limit=1)
    with ThreadPoolExecutor(1) as pool:
        with limit:
            call = pool.submit(limit.complete, REQUEST)
            assert not gate.entered.acquire(timeout=0.05)
        assert gate.entered.acquire(timeout=10)
        gate.open.set()
        assert call.result(10).ok


def test_close_lets_waiting_calls_through() -> None:
    gate = Gate()
    limit = Limit(gate, limit=1)
    with ThreadPoolExecutor(3) as pool:
        calls = [pool.submit(limit.complete, REQUEST) for _ in range(3)]
        assert gate.entered.acquire(timeout=10)
        limit.close()
        assert [call.result(10).text for call in calls] == ["ok"] * 3


def test_a_limit_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="limit=0 must be at least 1"):
        Limit(Gate(), limit=0)


def test_a_call_keeps_its_place_until_its_reply_is_delivered() -> None:
    gate, journaled = Gate(), threading.Event()
    gate.open.set()
    client = Coalesce(Counted(Limit(gate, limit=1)))
    deliveries: list[Completion] = []

    def deliver(completion: Completion) -> None:
        journaled.wait(10)
        deliveries.append(completion)

    with ThreadPoolExecutor(2) as pool:
        for text in ("one", "two"):
            work = client.join(ChatRequest.user(text, model="m"), deliver)
            assert work is not None
            pool.submit(work)
        assert gate.entered.acquire(timeout=10)
        assert not gate.entered.acquire(timeout=0.05)  # the second call waits for the first one's journal entry
        journaled.set()
    assert len(deliveries) == 2


@pytest.mark.parametrize("wrap", [lambda gate: Limit(gate, limit=1), Coalesce], ids=["for room", "for a twin"])
def test_a_call_does_not_wait_beyond_its_deadline(wrap: Callable[[Client], Client]) -> None:
    gate = Gate()
    client = wrap(gate)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(client.complete, replace(REQUEST, deadline=time.monotonic() + 30))
        assert gate.entered.acquire(timeout=10)
        late = client.complete(replace(REQUEST, deadline=time.monotonic() + 0.05))
        assert late.error is not None
        assert late.error.kind == "timeout"
        gate.open.set()
        assert first.result(10).ok
    assert client.complete(REQUEST).ok


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
