"""What the model calls of a run cost: a client around a client that counts them."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass

from query_mutator.llm.client import Client
from query_mutator.types import ChatRequest, Completion

_SUM_AFTER = 64  # completions


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTotals:
    """Sums over the calls that came back; times in seconds."""

    calls: int = 0
    failed: int = 0
    latency_s: float = 0.0  # what the client waited
    queue_wait_s: float = 0.0  # of that, what the server held calls back
    service_s: float = 0.0  # and what it worked on them
    tokens: int = 0  # prompts and replies together

    def __sub__(self, earlier: CallTotals) -> CallTotals:
        """Return what was added since `earlier`."""
        return CallTotals(
            calls=self.calls - earlier.calls,
            failed=self.failed - earlier.failed,
            latency_s=self.latency_s - earlier.latency_s,
            queue_wait_s=self.queue_wait_s - earlier.queue_wait_s,
            service_s=self.service_s - earlier.service_s,
            tokens=self.tokens - earlier.tokens,
        )


class Counted:
    """A client that keeps totals of what the inner client did; every attempt counts as a call."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._totals = CallTotals()
        self._new: list[Completion] = []  # not in the totals yet
        self.error_kinds: Counter[str] = Counter()
        self._lock = threading.Lock()  # guards the three above

    def __repr__(self) -> str:
        return f"Counted({self._client!r})"

    @property
    def totals(self) -> CallTotals:
        """Return the sums so far."""
        with self._lock:
            self._sum()
            return self._totals

    def complete(self, request: ChatRequest) -> Completion:
        """Return the inner client's reply, counted."""
        completion = self._client.complete(request)
        self.add(completion)
        return completion

    def go_on_from(self, totals: CallTotals) -> None:
        """Count on from the sums of an earlier part of a run."""
        with self._lock:
            self._totals, self._new = totals, []

    def add(self, completion: Completion) -> None:
        """Count a call that was made."""
        with self._lock:
            self._new.append(completion)
            if len(self._new) >= _SUM_AFTER:
                self._sum()
            if completion.error is not None:
                self.error_kinds[completion.error.kind] += 1

    def _sum(self) -> None:
        """Add what came since to the totals."""
        new, self._new, totals = self._new, [], self._totals
        self._totals = CallTotals(
            calls=totals.calls + len(new),
            failed=totals.failed + sum(not completion.ok for completion in new),
            latency_s=totals.latency_s + sum(completion.latency_s for completion in new),
            queue_wait_s=totals.queue_wait_s + sum(completion.queue_wait_s for completion in new),
            service_s=totals.service_s + sum(completion.prompt_eval_s + completion.eval_s for completion in new),
            tokens=totals.tokens + sum(completion.prompt_tokens + completion.completion_tokens for completion in new),
        )

    def close(self) -> None:
        """Close the inner client; idempotent."""
        self._client.close()
