"""Wait for a server that stopped answering (a restart, an update, out of memory): calls are held, none fails.

A call that lost its connection asks the servers for their version. If nothing answers, it and the calls after it wait
until a server does, and are made again; this costs no attempt. A server that answers with an error, or that never
answered, is not waited for.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from query_mutator.errors import BackendError, ServerDownError
from query_mutator.llm.cancellation import uncancelled
from query_mutator.llm.client import Backend, BackendWrapper, ModelServer
from query_mutator.llm.pool import error_of
from query_mutator.settings.calls import Calls
from query_mutator.types import ChatRequest, Completion, ErrorInfo, FloatArray

T = TypeVar("T")

logger = logging.getLogger(__name__)

POLL_S = 1.0  # between two questions whether a server is back
ANSWER_S = 5.0  # a version comes from the server's memory
MAX_ABSENCES = 3  # of one call: a request that ends the server must not be repeated forever


class WaitForServer(BackendWrapper):
    """A backend that holds calls while none of `servers` answers, for at most `wait_s` at a time.

    `show` is called with one line when a wait starts, and with "" when it ends.
    """

    def __init__(
        self,
        backend: Backend,
        servers: Sequence[ModelServer],
        *,
        wait_s: float = Calls.wait_for_server_s,
        show: Callable[[str], None] = lambda line: None,
    ) -> None:
        super().__init__(backend)
        self._servers = tuple(servers)
        self._wait_s = wait_s
        self._show = show
        self._lock = threading.Lock()  # guards the three below
        self._absence: _Absence | None = None
        self._has_answered = False
        self._has_given_up = False
        self._closed = threading.Event()

    def complete(self, request: ChatRequest) -> Completion:
        """Return the backend's reply, made again if the server went away meanwhile."""
        return self._call(lambda: self._backend.complete(request), error_of=lambda reply: reply.error)

    def embed(self, model: str, texts: Sequence[str]) -> FloatArray | ErrorInfo:
        """Return the embeddings of texts [n, dim], or why there are none."""
        return self._call(lambda: self._backend.embed(model, texts), error_of=error_of)

    def answered(self) -> None:
        """Record that the server answered: from now on it is waited for."""
        if self._has_given_up or not self._has_answered:
            with self._lock:
                self._has_answered, self._has_given_up = True, False

    def close(self) -> None:
        """Close the backend and end the wait: the calls held fail as those of a closed backend do; idempotent."""
        super().close()
        self._closed.set()

    def _call(self, once: Callable[[], T], *, error_of: Callable[[T], ErrorInfo | None]) -> T:
        absence = self._absence
        if absence is not None:  # no new call starts
            absence.over.wait()
        for absences in itertools.count():
            reply = once()
            error = error_of(reply)
            if error is None or error.status is not None:
                self.answered()
            if error is None or not _is_lost(error) or absences == MAX_ABSENCES or not self._waited():
                return reply
        raise AssertionError("unreachable")

    def _waited(self) -> bool:
        """Wait while nothing answers; return whether it is worth making the call again."""
        with self._lock:
            if not self._has_answered or self._has_given_up:
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
        if any(_answers(server, loading=True) for server in self._servers):
            return False
        began, since = time.monotonic(), time.strftime("%H:%M")
        self._show(f"server away since {since}, waiting")
        try:
            while not self._closed.wait(POLL_S):
                if any(_answers(server, loading=False) for server in self._servers):
                    logger.warning("%s: nothing answered from %s to %s", self.url, since, time.strftime("%H:%M"))
                    return True
                if time.monotonic() - began > self._wait_s:
                    with self._lock:
                        self._has_given_up = True
                    return False
            return True  # the backend is closed and says so
        finally:
            self._show("")


class _Absence:
    """A time in which no server answered, or one call's suspicion of it."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.was_real = False


def _is_lost(error: ErrorInfo) -> bool:
    """Return whether there was no connection, or it ended before the whole reply."""
    return error.kind in ("connect", "malformed") and error.status is None


def _answers(server: ModelServer, *, loading: bool) -> bool:
    """Return whether a server answers, if with an error; `loading` for one that asks to come back later."""
    try:
        server.version(timeout_s=ANSWER_S)
    except ServerDownError:
        return False
    except BackendError as error:
        return loading or error.kind != "busy"  # llama-server while it loads its model
    return True
