"""The servers of a run as one: a call goes to the server that is done with it soonest, and away from one that fails.

Each server has a breaker:

    closed     calls go there; a refused connection, or three failures in a row, opens it
    open       no calls for a while, longer every time
    half-open  one call is let through: an answer closes the breaker, a failure opens it again

A call that could not connect, got 503 or 429, or found no memory goes to the next server at once. One that lost its
connection to the last of them asks the servers for their version. If nothing answers (a restart, an update, out of
memory), it and the calls after it wait until a server does, and are made again; this costs no attempt. A server that
answers with an error, or that never answered, is not waited for.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from query_mutator.errors import BackendError, ServerDownError, UsageError
from query_mutator.llm.cancellation import uncancelled
from query_mutator.llm.client import ModelServer, error_of
from query_mutator.types import ChatRequest, Completion, ErrorInfo, FloatArray

T = TypeVar("T")

logger = logging.getLogger(__name__)

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

POLL_S = 1.0  # between two questions whether a server is back
ANSWER_S = 5.0  # a version comes from the server's memory
MAX_ABSENCES = 3  # of one call: a request that ends the server must not be repeated forever


@dataclass(slots=True)
class Server:
    """One server of a pool: its calls in flight, its speed and its breaker."""

    backend: ModelServer
    in_flight: int = 0
    last_used: int = 0
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

    def note(self, error: ErrorInfo | None, *, now: float, seconds: float = 0.0) -> None:
        """Record a reply that took `seconds`, or a failure; one that is about the request closes the breaker too."""
        if error is None:
            self.replies += 1
            self.mean_s += (seconds - self.mean_s) / min(self.replies, _WINDOW)
        elif error.kind == "cancelled":
            return
        if error is None or error.kind not in _UNHEALTHY:
            self.failures, self.breaks, self.open_until = 0, 0, 0.0
            return
        self.failures += 1
        was_trial = self.open_until != 0
        if was_trial or error.kind in _NOT_REACHED or self.failures >= FAILURES_TO_OPEN:
            if not was_trial or now >= self.open_until:
                self.breaks += 1
            self.open_until = now + min(MAX_BREAK_S, FIRST_BREAK_S * 2.0 ** (self.breaks - 1))


class _Absence:
    """A time in which no server answered, or one call's suspicion of it."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.was_real = False


class Pool:
    """A client that spreads calls over servers, and holds them while none answers, for at most `wait_s` at a time.

    `show` is called with one line when a wait starts, and with "" when it ends. `clock` is the breakers' time.
    """

    def __init__(
        self,
        backends: Sequence[ModelServer],
        *,
        wait_s: float = 0.0,
        show: Callable[[str], None] = lambda line: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not backends:
            raise ValueError("a pool needs at least one server")
        self.servers = tuple(Server(backend) for backend in backends)
        self.is_instant = all(backend.is_instant for backend in backends)
        self._wait_s, self._show, self._clock = wait_s, show, clock
        self._turns = 0
        self._lock = threading.Lock()  # guards the servers' counters, the turns and the three below
        self._absence: _Absence | None = None
        self._has_answered = self._has_given_up = False
        self._closed = threading.Event()

    def __repr__(self) -> str:
        return f"Pool({[server.backend for server in self.servers]!r})"

    @property
    def url(self) -> str:
        """Return the addresses of all servers."""
        return ", ".join(server.backend.url for server in self.servers)

    def complete(self, request: ChatRequest) -> Completion:
        """Return the reply of one server, or the last one's failure when none took the call."""
        return self._call(lambda backend: backend.complete(request))

    def embed(self, model: str, texts: Sequence[str]) -> FloatArray | ErrorInfo:
        """Return the embeddings of texts [n, dim] from one server, or the last one's failure."""
        return self._call(lambda backend: backend.embed(model, texts))

    def answered(self) -> None:
        """Record that a server answered: from now on it is waited for."""
        if self._has_given_up or not self._has_answered:
            with self._lock:
                self._has_answered, self._has_given_up = True, False

    def close(self) -> None:
        """Close all servers and end the wait: the calls held fail as those of a closed server do; idempotent."""
        for server in self.servers:
            server.backend.close()
        self._closed.set()

    def _call(self, once: Callable[[ModelServer], T]) -> T:
        absence = self._absence
        if absence is not None:  # no new call starts
            absence.over.wait()
        for absences in itertools.count():
            reply = self._try(once)
            error = error_of(reply)
            if error is None or error.status is not None:
                self.answered()
            if error is None or not is_lost(error) or absences == MAX_ABSENCES or not self._waited():
                return reply
        raise AssertionError("unreachable")

    def _try(self, once: Callable[[ModelServer], T]) -> T:
        """Return the reply of the first server that takes the call, else the last one's failure."""
        untried = list(self.servers)
        while True:
            server, started = self._choose(untried), self._clock()
            try:
                reply = once(server.backend)
                error, now = error_of(reply), self._clock()
                with self._lock:
                    server.note(error, now=now, seconds=now - started)
            finally:
                with self._lock:
                    server.in_flight -= 1
            untried.remove(server)
            if error is None or error.kind not in _ELSEWHERE or not untried:
                return reply

    def _choose(self, among: Sequence[Server]) -> Server:
        """Choose a server and count a call there; with all breakers open, the one that opened first."""
        with self._lock:
            now = self._clock()
            available = [server for server in among if server.is_available(now)]
            server = soonest(available) if available else min(among, key=lambda server: server.open_until)
            self._turns += 1
            server.last_used = self._turns
            server.in_flight += 1
            return server

    def _waited(self) -> bool:
        """Wait while nothing answers; return whether it is worth making the call again."""
        with self._lock:
            if not self._wait_s or not self._has_answered or self._has_given_up:
                return False
            absence, is_first = self._absence or _Absence(), self._absence is None
            self._absence = absence
        if is_first:
            try:
                with uncancelled():
                    absence.was_real = self._watch()
            finally:
                with self._lock:
                    self._absence = None
                absence.over.set()
        else:
            absence.over.wait()
        return absence.was_real

    def _watch(self) -> bool:
        """Poll the servers until one answers; False when one does at once, or when the time is up."""
        if self._is_answered(loading=True):
            return False
        began, since = time.monotonic(), time.strftime("%H:%M")
        self._show(f"server away since {since}, waiting")
        try:
            while not self._closed.wait(POLL_S):
                if self._is_answered(loading=False):
                    logger.warning("%s: nothing answered from %s to %s", self.url, since, time.strftime("%H:%M"))
                    return True
                if time.monotonic() - began > self._wait_s:
                    with self._lock:
                        self._has_given_up = True
                    return False
            return True  # the servers are closed and say so
        finally:
            self._show("")

    def _is_answered(self, *, loading: bool) -> bool:
        """Return whether a server answers, if with an error; `loading` for one that asks to come back later."""
        for server in self.servers:
            try:
                server.backend.version(timeout_s=ANSWER_S)
            except ServerDownError:
                continue
            except BackendError as error:
                if not loading and error.kind == "busy":  # llama-server while it loads its model
                    continue
            return True
        return False


def soonest(servers: Sequence[Server]) -> Server:
    """Return the server for the next call: fewest calls in flight, a slow server's weighing more.

    A tie goes to the one used longest ago.
    """
    if len(servers) == 1:
        return servers[0]
    normal_s = _MAX_NOISE * min((server.call_s for server in servers if server.call_s is not None), default=0.0)

    def load(server: Server) -> tuple[float, int]:
        slowness = max(1.0, server.call_s / normal_s) if server.call_s is not None and normal_s > 0 else 1.0
        return (server.in_flight + 1) * slowness, server.last_used

    return min(servers, key=load)


def is_lost(error: ErrorInfo) -> bool:
    """Return whether there was no connection, or it ended before the whole reply."""
    return error.kind in ("connect", "malformed") and error.status is None


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
