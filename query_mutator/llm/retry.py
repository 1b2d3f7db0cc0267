"""Retries of failed calls: which failures are transient, how long to wait, and a client that waits in its own thread.

RetryPolicy    the rule: a pure function from one failure to the wait before the next attempt
Attempts       the state of one call under a policy; the scheduler drives it with timers
Retry          a client that drives it in the calling thread
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from query_mutator.llm.client import Client, ClientWrapper
from query_mutator.settings.calls import Calls
from query_mutator.types import ChatRequest, Completion, ErrorInfo

T = TypeVar("T")

MAX_RETRY_AFTER_S = 120.0  # a server may ask for more; then the next attempt just fails again
MAX_TIMEOUTS = 1  # a retried timeout joins the end of the server's queue
#: Kinds of error after which the same call may succeed later.
TRANSIENT = frozenset({"connect", "timeout", "busy", "server", "malformed", "empty", "incomplete"})


def is_transient(error: ErrorInfo) -> bool:
    """Return whether the same call may succeed later; a wrong request or a missing model fails every time."""
    return error.kind in TRANSIENT


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Which failures are retried, how often, and after how long."""

    max_retries: int = Calls.max_retries
    deadline_s: float | None = None  # no attempt starts later than this after the first one
    first_delay_s: float = 0.25  # doubles with every attempt
    max_delay_s: float = 30.0

    def delay_s(
        self, error: ErrorInfo, attempt: int, *, key: str, elapsed_s: float = 0.0, timeouts: int | None = None
    ) -> float | None:
        """Return the seconds to wait before the next attempt, or None when the failure is final.

        `attempt` counts the calls made so far, from 1; `timeouts` of them timed out (None: all, if the last did). They
        took `elapsed_s`, waits included. Half of each wait is jitter drawn from `key` and `attempt`, so equal inputs
        give equal waits. A server's Retry-After is honored. A second timeout, a wrong request, a missing model, a
        server out of memory and a cancelled call are final.
        """
        if not is_transient(error) or attempt > self.max_retries:
            return None
        if error.kind == "timeout" and (attempt if timeouts is None else timeouts) > MAX_TIMEOUTS:
            return None
        longest_s = min(self.max_delay_s, self.first_delay_s * 2.0 ** (attempt - 1))
        delay_s = longest_s * (0.5 + 0.5 * _fraction(f"{attempt}:{key}"))
        delay_s = max(delay_s, min(error.retry_after_s or 0.0, MAX_RETRY_AFTER_S))
        return None if self.deadline_s is not None and elapsed_s + delay_s > self.deadline_s else delay_s


DEFAULT_POLICY = RetryPolicy()


def _fraction(text: str) -> float:
    """Return a number in [0, 1) that depends on the text alone."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") / 2**64


class Attempts:
    """The attempts at one call: how many started, how many timed out, and the wait before the next."""

    __slots__ = ("_key", "_policy", "_started", "_timeouts", "number")

    def __init__(self, policy: RetryPolicy, key: str) -> None:
        self._policy = policy
        self._key = key
        self._started = time.monotonic()
        self._timeouts = 0
        self.number = 0

    def next(self) -> int:
        """Start another attempt; return its number, from 1."""
        self.number += 1
        return self.number

    def delay_s(self, error: ErrorInfo | None) -> float | None:
        """Return the wait after the present attempt, None when it succeeded or failed for good."""
        if error is None:
            return None
        self._timeouts += error.kind == "timeout"
        elapsed_s = time.monotonic() - self._started
        return self._policy.delay_s(error, self.number, key=self._key, elapsed_s=elapsed_s, timeouts=self._timeouts)


def repeat(
    once: Callable[[], T], *, delay_s: Callable[[T], float | None], wait: Callable[[float], object] = time.sleep
) -> T:
    """Call `once` and wait in turns; return its result when `delay_s` of it is None, or when `wait` returns true."""
    while True:
        result = once()
        seconds = delay_s(result)
        if seconds is None or wait(seconds):
            return result


class Retry(ClientWrapper):
    """A client that retries failed calls; the wait is spent in the calling thread and ends at `close`."""

    def __init__(self, client: Client, policy: RetryPolicy = DEFAULT_POLICY) -> None:
        super().__init__(client)
        self.policy = policy
        self._closed = threading.Event()

    def complete(self, request: ChatRequest) -> Completion:
        """Return the first reply that is an answer, or the last failure; `attempts` says how many calls it took."""
        reply, attempts = self.call(
            lambda attempt: self._client.complete(replace(request, attempt=attempt) if attempt > 1 else request),
            error_of=lambda reply: reply.error,
            key=request.messages[-1].content,
        )
        return reply if attempts == 1 else replace(reply, attempts=attempts)

    def call(self, once: Callable[[int], T], *, error_of: Callable[[T], ErrorInfo | None], key: str) -> tuple[T, int]:
        """Return the last result of `once(attempt)` and the number of attempts; for calls without completions."""
        attempts = Attempts(self.policy, key)
        result = repeat(
            lambda: once(attempts.next()),
            delay_s=lambda result: attempts.delay_s(error_of(result)),
            wait=self._closed.wait,
        )
        return result, attempts.number

    def close(self) -> None:
        """Give up waiting and close the inner client; idempotent."""
        self._closed.set()
        super().close()
