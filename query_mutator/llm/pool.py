"""Several servers as one: a call goes to the server with the fewest calls in flight, and away from one that fails.

Each server has a breaker:

    closed     calls go there; a refused connection, or three failures in a row, opens it
    open       no calls for a while, longer every time
    half-open  one call is let through: an answer closes the breaker, a failure opens it again

A call that could not connect, got 503 or 429, or found no memory goes to the next server at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from query_mutator.errors import UsageError
from query_mutator.llm.client import Backend, ModelServer
from query_mutator.types import ChatRequest, Completion, ErrorInfo, FloatArray

T = TypeVar("T")

FAILURES_TO_OPEN = 3
FIRST_BREAK_S = 1.0  # doubles each time the breaker opens in a row
MAX_BREAK_S = 30.0

_NOT_REACHED = frozenset({"connect"})  # the server is gone: its breaker opens at once
_UNHEALTHY = _NOT_REACHED | {"busy", "memory", "timeout", "server", "malformed"}
_ELSEWHERE = _NOT_REACHED | {"busy", "memory", "prompt_too_long"}  # the call goes to another server at once

_MIN_SAMPLES = 8  # replies after which a server's speed counts
_WINDOW = 50  # replies in the running mean of a call's time
_MAX_NOISE = 1.5  # a server counts as slow above this ratio to the fastest one; less is chance
_SHOWN_CHARS = 12  # of a digest, as in `ollama list`


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
        """Return the mean seconds of a call, or None while too few are done."""
        return self.mean_s if self.replies >= _MIN_SAMPLES else None

    def is_available(self, now: float) -> bool:
        """Return whether a call may go here: the breaker is closed, or half-open without a trial call."""
        return self.open_until == 0 or (now >= self.open_until and self.in_flight == 0)

    def answered(self, seconds: float) -> None:
        """Record a reply."""
        self.replies += 1
        self.mean_s += (seconds - self.mean_s) / min(self.replies, _WINDOW)
        self.failures, self.breaks, self.open_until = 0, 0, 0.0

    def failed(self, kind: str, now: float) -> None:
        """Record a failure; one that is not about the server's health (a wrong request) closes the breaker too."""
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
    """A backend that spreads calls over several servers; `clock` is the breakers' time."""

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
        return self._call(lambda backend: backend.embed(model, texts), error_of=error_of)

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
        """Choose a server and count a call there; with all breakers open, the one that opened first."""
        with self._lock:
            now = self._clock()
            available = [server for server in among if server.is_available(now)]
            server = soonest(available) if available else min(among, key=lambda server: server.open_until)
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


def soonest(servers: Sequence[Server]) -> Server:
    """Return the server for the next call: fewest calls in flight, a slow server's weighing more.

    A tie goes to the one used longest ago.
    """
    normal_s = _MAX_NOISE * min((server.call_s for server in servers if server.call_s is not None), default=0.0)

    def load(server: Server) -> tuple[float, int]:
        slowness = max(1.0, server.call_s / normal_s) if server.call_s is not None and normal_s > 0 else 1.0
        return (server.in_flight + 1) * slowness, server.last_used

    return min(servers, key=load)


def error_of(reply: FloatArray | ErrorInfo) -> ErrorInfo | None:
    """Return the error in place of embeddings, if any."""
    return reply if isinstance(reply, ErrorInfo) else None


def require_same_models(servers: Sequence[ModelServer], models: Sequence[str], *, allow_mixed: bool = False) -> None:
    """Raise ModelMissingError unless every server has all models, UsageError when the digests of one differ.

    Otherwise a reply would depend on which server was free. A server that reports no digest is not compared.
    """
    for model in dict.fromkeys(models):
        digests = {server.url: server.digest(model) for server in servers}
        if not allow_mixed and len({digest for digest in digests.values() if digest}) > 1:
            found = ", ".join(f"{url} has {digest[:_SHOWN_CHARS]}" for url, digest in digests.items())
            raise UsageError(
                f"{model} is not the same on all servers ({found}): install the same weights on each, "
                "or give --allow-mixed"
            )
