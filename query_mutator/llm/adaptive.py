"""A bound on calls in flight that finds the server's own: up by one while calls do not wait there, down when they do.

    wait ratio = time the server held calls back / time it worked on them      (n calls on s slots: n / s - 1)

Additive increase, multiplicative decrease, as TCP does it. A window of the rule is as many calls as the limit allows at
once; calls that began under another limit tell nothing about this one and are left out.
"""

from __future__ import annotations

from query_mutator.llm.client import Client
from query_mutator.llm.limits import Limit
from query_mutator.types import ChatRequest, Completion

HIGH_WAIT_RATIO = 0.3  # below it waiting calls just keep the slots filled
NEGLIGIBLE_WAIT_S = 0.005  # a call; shorter waits are the server's own bookkeeping
DECREASE = 0.5  # the most a limit loses at once
_OVERLOAD = frozenset({"busy", "timeout"})


def next_limit(
    limit: int, *, wait_ratio: float = 0.0, overloaded: bool = False, was_full: bool = True, highest: int
) -> int:
    """Return the limit after a window: halved on overload, divided by what calls waited too long, else one more.

    A limit that was not reached (`was_full` false) does not grow, because nothing shows that more would do.
    """
    if overloaded:
        return max(1, int(limit * DECREASE))
    if wait_ratio > HIGH_WAIT_RATIO:
        return max(1, int(limit * max(DECREASE, 1 / (1 + wait_ratio))))
    return min(highest, limit + 1) if was_full else limit


class AdaptiveLimit(Limit):
    """A Limit that moves between 1 and `highest`, where it begins; `limit` is where it stands."""

    def __init__(self, client: Client, *, highest: int) -> None:
        super().__init__(client, limit=highest)
        self.highest = highest
        self._was_full = False
        self._begin_window()

    def __repr__(self) -> str:
        return f"AdaptiveLimit({self._client!r})"

    def complete(self, request: ChatRequest) -> Completion:
        """Return the inner client's reply as soon as there is room for the call, and learn from its times."""
        with self.slot():
            window = self._window
            completion = self._client.complete(request)
        self._learn(completion, window)
        return completion

    def _entered(self) -> None:
        self._was_full = self._was_full or self._in_flight >= self.limit

    def _learn(self, completion: Completion, window: object) -> None:
        with self._changed:
            if window is not self._window:
                return
            overloaded = completion.error is not None and completion.error.kind in _OVERLOAD
            self._calls += completion.ok
            self._waited_s += completion.queue_wait_s
            self._worked_s += completion.prompt_eval_s + completion.eval_s
            if overloaded or self._calls >= self.limit:
                self._move(overloaded=overloaded)

    def _move(self, *, overloaded: bool) -> None:
        is_waiting = self._waited_s > NEGLIGIBLE_WAIT_S * self._calls and self._worked_s > 0
        ratio = self._waited_s / self._worked_s if is_waiting else 0.0
        self.limit = next_limit(
            self.limit, wait_ratio=ratio, overloaded=overloaded, was_full=self._was_full, highest=self.highest
        )
        self._changed.notify()  # there may be room for one more
        self._begin_window()

    def _begin_window(self) -> None:
        self._window = object()  # what calls of this window carry
        self._calls = 0
        self._waited_s = 0.0
        self._worked_s = 0.0
        self._was_full = False
