"""Measure calls: a client that keeps every completion, and a bound on the time of a measurement."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from query_mutator.llm.client import Client, ClientWrapper
from query_mutator.types import ChatRequest, Completion

__all__ = ["Recorder", "out_of_time"]


class Recorder(ClientWrapper):
    """A client that keeps every completion of the inner client; out of time, it makes no further calls."""

    def __init__(self, client: Client) -> None:
        super().__init__(client)
        self.start()

    def start(self, seconds: float = math.inf) -> None:
        """Forget what was kept, and start the clock."""
        self.completions: list[Completion] = []
        self._started = time.perf_counter()
        self._ends_at = self._started + seconds

    @property
    def elapsed_s(self) -> float:
        """Return the seconds since `start`."""
        return time.perf_counter() - self._started

    def complete(self, request: ChatRequest) -> Completion:
        """Return the inner client's reply, and keep it."""
        if time.perf_counter() >= self._ends_at:
            return Completion.failed("cancelled", "out of time")
        completion = super().complete(request)
        self.completions.append(completion)  # atomic, so it needs no lock
        return completion


@contextmanager
def out_of_time(seconds: float, end: Callable[[], None]) -> Iterator[Callable[[], bool]]:
    """Call `end` after some time unless the block is left before; yield a function that says whether it was called."""
    is_over = threading.Event()

    def stop() -> None:
        is_over.set()
        end()

    timer = threading.Timer(seconds, stop)
    timer.daemon = True
    timer.start()
    try:
        yield is_over.is_set
    finally:
        timer.cancel()
