"""Which failed calls are worth another try, and after how long; and a client that waits and tries again."""

from __future__ import annotations

import hashlib
import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from query_mutator.llm.client import Client
from query_mutator.types import ChatRequest, Completion, ErrorInfo

T = TypeVar("T")

DEFAULT_MAX_RETRIES = 4
FIRST_DELAY_S = 0.25  # doubles with every attempt
MAX_DELAY_S = 30.0
MAX_RETRY_AFTER_S = 120.0  # a server may ask for more; then the next attempt just fails again

_WORTH_RETRYING = frozenset({"connect", "busy", "server", "malformed", "empty", "incomplete"})
MAX_TIMEOUTS = 1  # a retried time-out joins the end of the server's queue


def retry_delay_s(
    error: ErrorInfo,
    attempt: int,
    *,
    key: str,
    max_retries: int = DEFAULT_MAX_RETRIES,
    elapsed_s: float = 0.0,
    timeouts: int | None = None,
    deadline_s: float | None = None,
) -> float | None:
    """Return the seconds to wait before the next attempt, or None when the failure is final.

    `attempt` counts the calls made so far, from 1, of which `timeouts` timed out (None: all, if the last did). They
    took `elapsed_s` with their waits, and none begins later than `deadline_s` after the first. The wait doubles from
    0.25 s up to 30 s, of which a half is jitter drawn from `key` and `attempt`: equal inputs, equal waits. A server's
    Retry-After is waited out. A second time-out, a request that is wrong, a missing model, a server out of memory and a
    cancelled call stay as they are.
    """
    if error.kind == "timeout":
        if (attempt if timeouts is None else timeouts) > MAX_TIMEOUTS:
            return None
    elif error.kind not in _WORTH_RETRYING:
        return None
    if attempt > max_retries:
        return None
    ceiling_s = min(MAX_DELAY_S, FIRST_DELAY_S * 2.0 ** (attempt - 1))
    delay_s = ceiling_s * (0.5 + 0.5 * _fraction(f"{attempt}:{key}"))
    delay_s = max(delay_s, min(error.retry_after_s or 0.0, MAX_RETRY_AFTER_S))
    return None if deadline_s is not None and elapsed_s + delay_s > deadline_s else delay_s


def _fraction(text: str) -> float:
    """Return a number in [0, 1) that depends on the text alone."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") / 2**64


class Retry:
    """A client that tries failed calls again; the wait is spent in the calling thread and ends at `close`."""

    def __init__(
        self, client: Client, *, max_retries: int = DEFAULT_MAX_RETRIES, deadline_s: float | None = None
    ) -> None:
        self._client = client
        self.max_retries = max_retries
        self.deadline_s = deadline_s
        self._closed = threading.Event()

    def __repr__(self) -> str:
        return f"Retry({self._client!r})"

    def complete(self, request: ChatRequest) -> Completion:
        """Return the first reply that is an answer, or the last failure; `attempts` says how many calls it took."""
        reply, attempts = self.call(
            lambda attempt: self._client.complete(replace(request, attempt=attempt) if attempt > 1 else request),
            error_of=lambda reply: reply.error,
            key=request.messages[-1].content,
        )
        return reply if attempts == 1 else replace(reply, attempts=attempts)

    def call(self, once: Callable[[int], T], *, error_of: Callable[[T], ErrorInfo | None], key: str) -> tuple[T, int]:
        """Return what the last call of `once(attempt)` gave and how many there were; for calls without completions."""
        started, timeouts = time.monotonic(), 0
        for attempt in itertools.count(1):
            reply = once(attempt)
            error = error_of(reply)
            timeouts += error is not None and error.kind == "timeout"
            elapsed_s = time.monotonic() - started
            delay_s = None if error is None else self._delay_s(error, attempt, key, elapsed_s, timeouts)
            if delay_s is None or self._closed.wait(delay_s):
                return reply, attempt
        raise AssertionError("count() has no end")

    def _delay_s(self, error: ErrorInfo, attempt: int, key: str, elapsed_s: float, timeouts: int) -> float | None:
        return retry_delay_s(
            error,
            attempt,
            key=key,
            max_retries=self.max_retries,
            elapsed_s=elapsed_s,
            timeouts=timeouts,
            deadline_s=self.deadline_s,
        )

    def close(self) -> None:
        """Give up waiting and close the client within; idempotent."""
        self._closed.set()
        self._client.close()
