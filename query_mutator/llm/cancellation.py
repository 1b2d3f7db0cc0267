"""Cancel a call that runs in another thread: its connection is cut, at which the server stops working on the reply.

    await complete_in_thread(client, request)     cancelling the task cancels the call

A call that waits for its turn makes no request once it is cancelled. A model in this process finishes its reply.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from contextvars import ContextVar

from query_mutator.llm.client import Client
from query_mutator.llm.connection import Connection
from query_mutator.types import ChatRequest, Completion


class Cancellation:
    """The calls of one thread, which `cancel` ends from any other."""

    def __init__(self) -> None:
        self.is_set = False
        self._connections: set[Connection] = set()
        self._lock = threading.Lock()  # guards the two above

    def cancel(self) -> None:
        """Cut the calls in flight, and those that start later; idempotent."""
        with self._lock:
            self.is_set = True
            for connection in self._connections:
                connection.cut()

    @contextmanager
    def covering(self, connection: Connection) -> Iterator[None]:
        """Cut a connection when cancelled; one that was cut is closed, so that no later call gets it."""
        with self._lock:
            self._connections.add(connection)
            if self.is_set:
                connection.cut()
        try:
            yield
        finally:
            with self._lock:
                self._connections.discard(connection)
                if self.is_set:
                    connection.close()


_current: ContextVar[Cancellation | None] = ContextVar("cancellation", default=None)


def current_cancellation() -> Cancellation | None:
    """Return what cancels the calls of this thread, None if nothing does."""
    return _current.get()


@contextmanager
def uncancelled() -> Iterator[None]:
    """Make calls for others too, which the cancellation of the one that is made does not end."""
    token = _current.set(None)
    try:
        yield
    finally:
        _current.reset(token)


async def complete_in_thread(client: Client, request: ChatRequest, executor: Executor | None = None) -> Completion:
    """Return a client's completion, awaited; cancelling the task cancels the call."""
    cancellation = Cancellation()

    def complete() -> Completion:
        token = _current.set(cancellation)
        try:
            return client.complete(request)
        finally:
            _current.reset(token)

    try:
        return await asyncio.get_running_loop().run_in_executor(executor, complete)
    except asyncio.CancelledError:
        cancellation.cancel()
        raise
