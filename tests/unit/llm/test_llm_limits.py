"""The bound on calls in flight."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from query_mutator.llm.client import Client
from query_mutator.llm.coalesce import Coalesce
from query_mutator.llm.limit import Limit
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


def test_no_more_calls_than_the_limit_are_in_flight() -> None:
    gate = Gate()
    limit = Limit(gate, limit=3)
    with ThreadPoolExecutor(12) as pool:
        calls = [pool.submit(limit.complete, REQUEST) for _ in range(12)]
        for _ in range(3):
            assert gate.entered.acquire(timeout=10)
        gate.open.set()
        assert all(call.result(10).ok for call in calls)
    assert gate.most == 3


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


def test_repr_prints_the_nesting() -> None:
    assert repr(Limit(Gate(), limit=1)) == "Limit(Gate())"


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
