"""Several servers as one: a call goes where the fewest are in flight, and away from a server that fails.

Each server has a breaker:

    closed     calls go there; a refused connection, or three failures in a row, opens it
    open       no calls for a while, longer every time
    half-open  one call is let through: an answer closes the breaker, a failure opens it again

A call that could not connect, was told to come back later, or found no memory goes to the next server at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from query_mutator.llm.client import Backend
from query_mutator.types import ChatRequest, Completion, ErrorInfo

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    FloatArray = NDArray[np.float32]

T = TypeVar("T")

FAILURES_TO_OPEN = 3
FIRST_BREAK_S = 1.0  # doubles each time the breaker opens in a row
MAX_BREAK_S = 30.0

_NOT_REACHED = frozenset({"connect"})  # the server is gone: its breaker opens at once
_ELSEWHERE = _NOT_REACHED | {"busy", "memory"}  # worth another server at once
_UNHEALTHY = _ELSEWHERE | {"timeout", "server", "malformed"}

_MIN_SAMPLES = 8  # replies after which a server's speed counts
_MEMORY = 50  # replies that the mean time of one is formed over
_ALIKE = 1.5  # times a call may take longer than on the fastest server before that counts: less is chance


def pick(in_flight: Sequence[int], call_s: Sequence[float | None], last_used: Sequence[int]) -> int:
    """Return the index of the server for the next call: fewest calls in flight, a slow server's counting for more.

    `call_s` is the mean time of a call on each server (None: not known yet); at a tie the one used longest ago.
    """
    known = [seconds for seconds in call_s if seconds is not None]
    alike_s = _ALIKE * min(known, default=0.0)

    def load(index: int) -> tuple[float, int]:
        seconds = call_s[index]
        slowness = max(1.0, seconds / alike_s) if seconds is not None and alike_s > 0 else 1.0
        return (in_flight[index] + 1) * slowness, last_used[index]

    return min(range(len(in_flight)), key=load)


@dataclass(slots=True)
class Server:
    """One server of a pool: its backend, its calls in flight, its speed and its breaker."""

    backend: Backend
    in_flight: int = 0
    last_used: int = 0
    calls: int = 0
    replies: int = 0
    mean_s: float = 0.0
    failures: int = 0  # in a row
    breaks: int = 0  # in a row
    open_until: float = 0.0  # time.monotonic(); 0 while closed

    @property
    def call_s(self) -> float | None:
        """Return the mean seconds of a call, or None while too few came back."""
        return self.mean_s if self.replies >= _MIN_SAMPLES else None

    def is_available(self, now: float) -> bool:
        """Return whether a call may go here: the breaker is closed, or half-open and nobody is trying."""
        return self.open_until == 0 or (now >= self.open_until and self.in_flight == 0)

    def answered(self, seconds: float) -> None:
        """Note a reply."""
        self.replies += 1
        self.mean_s += (seconds - self.mean_s) / min(self.replies, _MEMORY)
        self.failures, self.breaks, self.open_until = 0, 0, 0.0

    def failed(self, kind: str, now: float) -> None:
        """Note a failure; what says nothing about the server's health (a wrong request) closes its breaker too."""
        if kind not in _UNHEALTHY:
            self.failures, self.breaks, self.open_until = 0, 0, 0.0
            return
        self.failures += 1
        was_trial = self.open_until != 0
        if was_trial or kind in _NOT_REACHED or self.failures >= FAILURES_TO_OPEN:
            if not was_trial or now >= self.open_until:
                self.breaks += 1
            self.open_until = now + min(MAX_BREAK_S, FIRST_BREAK_S * 2.0 ** (self.breaks - 1))


class Pool:
    """A backend that spreads calls over several servers; `clock` is what the breakers go by."""

    def __init__(self, backends: Sequence[Backend], *, clock: Callable[[], float] = time.monotonic) -> None:
        if not backends:
            raise ValueError("a pool needs at least one server")
        self.servers = tuple(Server(backend) for backend in backends)
        self._clock = clock
        self._turns = 0
        self._lock = threading.Lock()  # guards the servers' counters and the turns

    def __repr__(self) -> str:
        return f"Pool({[server.backend for server in self.servers]!r})"

    @property
    def url(self) -> str:
        """Return the addresses of all servers."""
        return ", ".join(server.backend.url for server in self.servers)

    def complete(self, request: ChatRequest) -> Completion:
        """Return the reply of one server, or the last one's failure when none took the call."""
        return self._call(lambda backend: backend.complete(request), error_of=lambda reply: reply.error)

    def embed(self, model: str, texts: Sequence[str]) -> FloatArray | ErrorInfo:
        """Return the embeddings of texts [n, dim] from one server, or the last one's failure."""

        def once(backend: Backend) -> FloatArray | ErrorInfo:
            return backend.embed(model, texts)

        return self._call(once, error_of=_error_of)

    def close(self) -> None:
        """Close all backends; idempotent."""
        for server in self.servers:
            server.backend.close()

    def _call(self, once: Callable[[Backend], T], *, error_of: Callable[[T], ErrorInfo | None]) -> T:
        untried = list(self.servers)
        while True:
            with self._place(untried) as server:
                started = self._clock()
                reply = once(server.backend)
                error = error_of(reply)
                self._note(server, error, seconds=self._clock() - started)
            untried.remove(server)
            if error is None or error.kind not in _ELSEWHERE or not untried:
                return reply

    @contextmanager
    def _place(self, among: Sequence[Server]) -> Iterator[Server]:
        """Choose a server and count a call there; with all breakers open the one that opened first is tried."""
        with self._lock:
            now = self._clock()
            open_to_us = [server for server in among if server.is_available(now)]
            server = _next(open_to_us) if open_to_us else min(among, key=lambda server: server.open_until)
            self._turns += 1
            server.last_used = self._turns
            server.calls += 1
            server.in_flight += 1
        try:
            yield server
        finally:
            with self._lock:
                server.in_flight -= 1

    def _note(self, server: Server, error: ErrorInfo | None, *, seconds: float) -> None:
        with self._lock:
            if error is None:
                server.answered(seconds)
            elif error.kind != "cancelled":
                server.failed(error.kind, self._clock())


def _error_of(reply: FloatArray | ErrorInfo) -> ErrorInfo | None:
    return reply if isinstance(reply, ErrorInfo) else None


def _next(servers: Sequence[Server]) -> Server:
    index = pick(
        [server.in_flight for server in servers],
        [server.call_s for server in servers],
        [server.last_used for server in servers],
    )
    return servers[index]
