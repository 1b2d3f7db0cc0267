"""One bound on the calls in flight, shared by every kind of call."""

from __future__ import annotations

import threading

from query_mutator.llm.client import Client
from query_mutator.types import ChatRequest, Completion


class Limit:
    """A client that lets at most `limit` calls through at once; the others wait for their turn."""

    def __init__(self, client: Client, *, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"limit={limit} must be at least 1")
        self._client = client
        self.limit = limit
        self._in_flight = 0
        self._closed = False
        self._lock = threading.Lock()  # guards the two above, and the number of those who wait
        self._changed = threading.Condition(self._lock)
        self._waiting = 0

    def __repr__(self) -> str:
        return f"Limit({self._client!r})"

    def complete(self, request: ChatRequest) -> Completion:
        """Return the inner client's reply as soon as there is room for the call."""
        with self.slot():
            return self._client.complete(request)

    def slot(self) -> Limit:
        """Hold one place among the calls in flight, as a context, for calls that are no completions (embeddings)."""
        return self

    def __enter__(self) -> None:
        with self._lock:
            # A closed client answers at once, so nobody needs to wait any more.
            while self._in_flight >= self.limit and not self._closed:
                self._waiting += 1
                self._changed.wait()
                self._waiting -= 1
            self._in_flight += 1
            self._entered()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._in_flight -= 1
            if self._waiting:
                self._changed.notify()

    def _entered(self) -> None:
        """Note that a call got its place; for limits that learn."""

    def close(self) -> None:
        """Let waiting calls through to the inner client, which is closed and fails them; idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._client.close()
