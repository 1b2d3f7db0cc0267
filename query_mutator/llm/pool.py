"""The servers of a run as one: a call goes to the server with the fewest calls in flight, and away from one that fails.

A server that refuses a connection, or fails three times in a row, rests for a while, longer every time; then one call
is let through. A call that could not connect, got 503 or 429, or found no memory goes to the next server at once. If
nothing answers any more (a restart, an update, out of memory), calls wait until a server does, and are made again; this
costs no attempt. A server that answers with an error, or that never answered, is not waited for.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from query_mutator.errors import BackendError, ServerDownError
from query_mutator.llm.cancellation import CANCELLATION
from query_mutator.llm.client import ModelServer
from query_mutator.types import ChatRequest, Completion, ErrorInfo

logger = logging.getLogger(__name__)

MAX_FAILURES = 3  # in a row, after which a server rests
MAX_REST_S = 30.0  # from 1 s, doubled each time

_ELSEWHERE = frozenset({"connect", "busy", "memory", "prompt_too_long"})  # the call goes to another server at once
_UNHEALTHY = frozenset({"connect", "busy", "memory", "timeout", "server", "malformed"})

POLL_S = 1.0  # between two questions whether a server is back
ANSWER_S = 5.0  # a version comes from the server's memory
MAX_ABSENCES = 3  # of one call: a request that ends the server must not be repeated forever


@dataclass(slots=True)
class Server:
    """One server of a pool, its calls in flight and its failures."""

    backend: ModelServer
    in_flight: int = 0
    last_used: int = 0
    failures: int = 0  # in a row
    rests_until: float = 0.0  # time.monotonic(); 0 while it is healthy

    def is_available(self, now: float) -> bool:
        """Return whether a call may go here: the server is healthy, or has rested and has no call in flight."""
        return self.rests_until == 0 or (now >= self.rests_until and self.in_flight == 0)

    def note(self, error: ErrorInfo | None, *, now: float) -> None:
        """Record a reply, or a failure; one that is about the request shows a healthy server too."""
        if error is None or error.kind not in _UNHEALTHY:
            if error is None or error.kind != "cancelled":
                self.failures, self.rests_until = 0, 0.0
        elif now >= self.rests_until:  # else the call began before the rest
            self.failures = max(self.failures + 1, MAX_FAILURES if error.kind == "connect" else 0)
            if self.failures >= MAX_FAILURES:
                self.rests_until = now + min(MAX_REST_S, 2.0 ** (self.failures - MAX_FAILURES))


class Pool:
    """A client that spreads calls over servers, and holds them while none answers, for at most `wait_s` at a time.

    `show` is called with one line when a wait starts, and with "" when it ends. `clock` is that of the rests.
    """

    def __init__(
        self,
        backends: Sequence[ModelServer],
        *,
        wait_s: float = 0.0,
        show: Callable[[str], None] = lambda line: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.servers = tuple(Server(backend) for backend in backends)
        self.is_instant = all(backend.is_instant for backend in backends)
        self._wait_s, self._show, self._clock = wait_s, show, clock
        self._turns = 0
        self._lock = threading.Lock()  # guards the servers' counters and the turns
        self.has_answered = False  # since the last wait that was in vain: then a server that is away is waited for
        self._is_there, self._closed = threading.Event(), threading.Event()
        self._is_there.set()
        self._watching = threading.Lock()  # one call asks for all that wait
        self._absences = 0

    def __repr__(self) -> str:
        return f"Pool({[server.backend for server in self.servers]!r})"

    def complete(self, request: ChatRequest) -> Completion:
        """Return the reply of one server, or the last one's failure when none took the call."""
        absences = 0
        while True:
            self._is_there.wait()
            seen = self._absences
            reply = self._try(request)
            error = reply.error
            if error is None or error.status is not None:
                self.has_answered = True
            if error is None or not is_lost(error) or absences == MAX_ABSENCES or not self._waited(seen):
                return reply
            absences += 1

    def close(self) -> None:
        """Close all servers and end the wait: the calls held fail as those of a closed server do; idempotent."""
        for server in self.servers:
            server.backend.close()
        self._closed.set()

    def _try(self, request: ChatRequest) -> Completion:
        """Return the reply of the first server that takes the call, else the last one's failure."""
        untried = list(self.servers)
        while True:
            server, reply = self._choose(untried), None
            try:
                reply = server.backend.complete(request)
            finally:
                with self._lock:
                    server.in_flight -= 1
                    if reply is not None:
                        server.note(reply.error, now=self._clock())
            untried.remove(server)
            if reply.error is None or reply.error.kind not in _ELSEWHERE or not untried:
                return reply

    def _choose(self, among: Sequence[Server]) -> Server:
        """Choose a server and count a call there: fewest in flight, used longest ago; if all rest, whose rest ends."""
        with self._lock:
            now = self._clock()
            available = [server for server in among if server.is_available(now)]
            if available:
                server = min(available, key=lambda server: (server.in_flight, server.last_used))
            else:
                server = min(among, key=lambda server: server.rests_until)
            self._turns += 1
            server.last_used = self._turns
            server.in_flight += 1
            return server

    def _waited(self, seen: int) -> bool:
        """Wait while nothing answers; return whether there was an absence since the call began, after `seen` ones."""
        with self._watching:
            if self._absences == seen and self._wait_s and self.has_answered:
                self._absences += self._watch()
            return self._absences != seen

    def _watch(self) -> bool:
        """Poll the servers until one answers; False when one does at once, or when the time is up."""
        if self._is_answered(loading=True):
            return False
        began, since = time.monotonic(), time.strftime("%H:%M")
        self._is_there.clear()
        self._show(f"server away since {since}, waiting")
        try:
            while not self._closed.wait(POLL_S):
                if self._is_answered(loading=False):
                    logger.warning("%r: nothing answered from %s to %s", self, since, time.strftime("%H:%M"))
                    return True
                self.has_answered = time.monotonic() - began < self._wait_s
                if not self.has_answered or CANCELLATION.get().is_set:  # another call that waits asks from now on
                    return False
            return True  # the servers are closed and say so
        finally:
            self._show("")
            self._is_there.set()

    def _is_answered(self, *, loading: bool) -> bool:
        """Return whether a server answers, if with an error; `loading` for one that asks to come back later."""
        for server in self.servers:
            try:
                server.backend.version(timeout_s=ANSWER_S)
            except ServerDownError:
                continue
            except BackendError as error:
                if error.kind == "cancelled" or (not loading and error.kind == "busy"):  # llama-server while it loads
                    continue
            return True
        return False


def is_lost(error: ErrorInfo) -> bool:
    """Return whether there was no connection, or it ended before the whole reply."""
    return error.kind in ("connect", "malformed") and error.status is None
