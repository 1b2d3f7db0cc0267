"""Retries of failed calls: which failures are transient, how long to wait, and a client that waits in its own thread.

RetryPolicy    the rule: a pure function from one failure to the wait before the next attempt
Attempts       the state of one call under a policy; a scheduler drives it with timers, `Retry` in a thread
"""

from __future__ import annotations

import hashlib
import threading
import time
from dataclasses import dataclass, replace

from query_mutator.llm.client import Client, ClientWrapper
from query_mutator.settings import Calls
from query_mutator.types import ChatRequest, Completion, ErrorInfo

MAX_RETRY_AFTER_S = 120.0  # a server may ask for more; then the next attempt just fails again
MAX_TIMEOUTS = 1  # a retried timeout joins the end of the server's queue
#: Kinds of error after which the same call may succeed later; a wrong request or a missing model fails every time.
TRANSIENT = frozenset({"connect", "timeout", "busy", "server", "malformed", "empty", "incomplete"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Policy for retries: which failures, how often, and after which delay."""

    max_retries: int = Calls.max_retries
    first_delay_s: float = 0.25  # doubles with every attempt
    max_delay_s: float = 30.0

    def delay_s(self, error: ErrorInfo, attempt: int, *, key: str, timeouts: int | None = None) -> float | None:
        """Return the seconds to wait before the next attempt, or None when the failure is final.

        `attempt` counts the calls made so far, from 1; `timeouts` of them timed out (None: all, if the last did). Half
        of each wait is jitter drawn from `key` and `attempt`, so equal inputs give equal waits. A server's Retry-After
        is honored. A second timeout, a wrong request, a missing model, a server out of memory and a cancelled call are
        final.
        """
        if error.kind not in TRANSIENT or attempt > self.max_retries:
            return None
        if error.kind == "timeout" and (attempt if timeouts is None else timeouts) > MAX_TIMEOUTS:
            return None
        longest_s = min(self.max_delay_s, self.first_delay_s * 2.0 ** (attempt - 1))
        digest = hashlib.blake2b(f"{attempt}:{key}".encode(), digest_size=8).digest()
        delay_s = longest_s * (0.5 + 0.5 * int.from_bytes(digest, "big") / 2**64)
        return max(delay_s, min(error.retry_after_s or 0.0, MAX_RETRY_AFTER_S))


DEFAULT_POLICY = RetryPolicy()


class Attempts:
    """The attempts at one call: how many started, how many timed out, and the wait before the next."""

    __slots__ = ("_number", "_policy", "_request", "_timeouts")

    def __init__(self, request: ChatRequest, policy: RetryPolicy) -> None:
        self._request, self._policy = request, policy
        self._number = self._timeouts = 0

    def next(self) -> ChatRequest:
        """Start another attempt; return its request, which has its number."""
        self._number += 1
        return self._request if self._number == 1 else replace(self._request, attempt=self._number)

    def delay_s(self, error: ErrorInfo | None) -> float | None:
        """Return the wait before the next attempt, None when this one succeeded or failed for good."""
        if error is None:
            return None
        self._timeouts += error.kind == "timeout"
        key = self._request.messages[-1].content if self._request.messages else self._request.model
        delay_s = self._policy.delay_s(error, self._number, key=key, timeouts=self._timeouts)
        deadline = self._request.deadline
        is_late = delay_s is not None and deadline is not None and time.monotonic() + delay_s >= deadline
        return None if is_late else delay_s

    def result(self, completion: Completion) -> Completion:
        """Return the completion with the number of attempts."""
        return completion if self._number == 1 else replace(completion, attempts=self._number)


class Retry(ClientWrapper):
    """A client that retries failed calls; the wait is spent in the calling thread and ends at `close`."""

    def __init__(self, client: Client, policy: RetryPolicy = DEFAULT_POLICY) -> None:
        super().__init__(client)
        self.policy = policy
        self._closed = threading.Event()

    def complete(self, request: ChatRequest) -> Completion:
        """Return the first reply that is an answer, or the last failure; `attempts` says how many calls it took."""
        attempts = Attempts(request, self.policy)
        while True:
            reply = self._client.complete(attempts.next())
            seconds = attempts.delay_s(reply.error)
            if seconds is None or self._closed.wait(seconds):
                return attempts.result(reply)

    def close(self) -> None:
        """Give up waiting and close the inner client; idempotent."""
        self._closed.set()
        super().close()
