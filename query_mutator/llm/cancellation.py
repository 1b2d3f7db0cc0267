"""Calls in flight that end at their deadline, or when another thread cuts them: the server then stops working on them.

    await complete_in_thread(client, request)     cancelling the task cancels the call

A call that waits for its turn makes no request once it is cancelled. A model in this process finishes its reply.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from concurrent.futures import Executor
from contextlib import suppress
from contextvars import ContextVar, copy_context
from typing import Self

from query_mutator.llm.client import Client
from query_mutator.types import ChatRequest, Completion


class Call:
    """One call of this thread, from connecting to the last byte of the reply; any thread may cut it."""

    def __init__(self, timeout_s: float, *cancellations: Cancellation) -> None:
        self._ends_at = time.monotonic() + timeout_s
        self._cancellations = cancellations
        self._socket: socket.socket | None = None  # the one in use
        self._is_copy = False  # of its handle
        self._lock = threading.Lock()  # guards the two above and `is_cut`
        self.is_cut = False
        self.is_first = False  # on its connection
        self.is_answered = False  # a byte of the reply has arrived

    def __enter__(self) -> Self:
        self._token = CALL.set(self)
        for each in self._cancellations:
            each.calls.add(self)
            if each.is_set:
                self.cut()
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._cancellations:
            each.calls.discard(self)
        CALL.reset(self._token)
        self.release()

    def left_s(self) -> float:
        """Return the seconds left; TimeoutError when there are none."""
        left_s = self._ends_at - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        return left_s

    def hold(self, sock: socket.socket, *, copy: bool = False) -> None:
        """Let `cut` shut down this socket from now on; ConnectionAbortedError if the call was cut.

        A TLS handshake moves the handle to another object, so `copy` is needed before.
        """
        self.release()
        with self._lock:
            if self.is_cut:
                raise ConnectionAbortedError("the call was cut")
            self._socket, self._is_copy = (sock.dup() if copy else sock), copy

    def release(self) -> None:
        """Leave the socket alone from now on: another call may use it."""
        with self._lock:
            if self._socket is not None and self._is_copy:
                self._socket.close()
            self._socket = None

    def cut(self) -> None:
        """End from another thread whatever the call waits for; idempotent."""
        with self._lock, suppress(OSError):
            self.is_cut = True
            if self._socket is not None:
                # The plain socket's method: that of a TLS socket would pull its state away under the reading thread.
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)


class Cancellation:
    """Calls that `cancel` ends from any thread: those of a task, or those to a server."""

    def __init__(self) -> None:
        self.is_set = False
        self.calls: set[Call] = set()  # without a lock, which a fork might leave locked: each step is atomic

    def cancel(self) -> None:
        """Cut the calls in flight, and those that start later; idempotent."""
        self.is_set = True
        for call in list(self.calls):
            call.cut()


#: The call that a thread makes, and what cancels its calls.
CALL: ContextVar[Call] = ContextVar("call")
CANCELLATION: ContextVar[Cancellation] = ContextVar("cancellation", default=Cancellation())  # noqa: B039, never set


async def complete_in_thread(client: Client, request: ChatRequest, executor: Executor | None = None) -> Completion:
    """Return a client's completion, awaited; cancelling the task cancels the call."""
    cancellation, context = Cancellation(), copy_context()
    context.run(CANCELLATION.set, cancellation)
    try:
        return await asyncio.get_running_loop().run_in_executor(executor, context.run, client.complete, request)
    except asyncio.CancelledError:
        cancellation.cancel()
        raise
