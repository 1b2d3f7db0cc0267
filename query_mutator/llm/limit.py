"""One bound on the calls in flight, shared by all calls; fixed, or found from the times the server reports.

    wait ratio = time the server queued calls / time it worked on them      (n calls on s slots: n / s - 1)

An adaptive limit increases additively and decreases multiplicatively, as TCP does. Its window is as many calls as the
limit allows at once; calls that started under another limit are ignored.
"""

from __future__ import annotations

import threading
import time

from query_mutator.llm.client import Client, ClientWrapper
from query_mutator.types import ChatRequest, Completion

HIGH_WAIT_RATIO = 0.3  # below it waiting calls just keep the slots filled
NEGLIGIBLE_WAIT_S = 0.005  # a call; shorter waits are the server's own bookkeeping
DECREASE = 0.5  # the smallest factor a limit is multiplied by at once
_OVERLOAD = frozenset({"busy", "timeout"})


class Limit(ClientWrapper):
    """A client that lets at most `limit` calls through at once; an adaptive one moves between 1 and where it starts."""

    def __init__(self, client: Client, *, limit: int, is_adaptive: bool = False) -> None:
        super().__init__(client)
        self.limit = self._highest = limit
        self._is_adaptive = is_adaptive
        self._in_flight = self._waiting = 0
        self._closed = self._was_full = False
        self._changed = threading.Condition(threading.Lock())  # guards all of this
        self._start_window()

    def complete(self, request: ChatRequest) -> Completion:
        """Return the inner client's reply as soon as there is room for the call, if there is before its deadline."""
        if not self._take(request.deadline):
            return Completion.failed("timeout", "the deadline passed before there was room for the call")
        try:
            window = self._window
            reply = self._client.complete(request)
            if self._is_adaptive:
                self._learn(reply, window)
            return reply
        finally:
            with self._changed:
                self._in_flight -= 1
                if self._waiting:
                    self._changed.notify()

    def _take(self, deadline: float | None) -> bool:
        """Take a place as soon as there is one; return whether there was before a time of `time.monotonic()`."""
        with self._changed:
            # A closed client answers at once, so nobody needs to wait any more.
            while self._in_flight >= self.limit and not self._closed:
                left_s = None if deadline is None else deadline - time.monotonic()
                if left_s is not None and left_s <= 0:
                    self._changed.notify()  # this one may have been notified of a place
                    return False
                self._waiting += 1
                self._changed.wait(left_s)
                self._waiting -= 1
            self._in_flight += 1
            self._was_full = self._was_full or self._in_flight >= self.limit
            return True

    def close(self) -> None:
        """Let waiting calls through to the inner client, which is closed and fails them; idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        super().close()

    def _learn(self, completion: Completion, window: object) -> None:
        """Count a call that started in a window; at its end, move the limit."""
        with self._changed:
            if window is not self._window:
                return
            is_overload = completion.error is not None and completion.error.kind in _OVERLOAD
            self._calls += completion.ok
            self._waited_s += completion.queue_wait_s
            self._worked_s += completion.prompt_eval_s + completion.eval_s
            if not is_overload and self._calls < self.limit:
                return
            is_waiting = self._waited_s > NEGLIGIBLE_WAIT_S * self._calls and self._worked_s > 0
            ratio = self._waited_s / self._worked_s if is_waiting else 0.0
            if is_overload or ratio > HIGH_WAIT_RATIO:
                self.limit = max(1, int(self.limit * (DECREASE if is_overload else max(DECREASE, 1 / (1 + ratio)))))
            elif self._was_full:  # else nothing shows that more would do
                self.limit = min(self._highest, self.limit + 1)
            self._changed.notify()  # there may be room for one more
            self._start_window()

    def _start_window(self) -> None:
        self._window = object()  # identifies the calls of this window
        self._calls = 0
        self._waited_s = self._worked_s = 0.0
        self._was_full = False
