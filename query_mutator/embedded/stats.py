"""Counters of the embedded server: `GET /debug/stats` returns them, `DELETE /debug/stats` also resets them.

pending_loads -> waiting (for a slot) -> in_service -> calls (done), or cancelled at any point
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

__all__ = ["Stats"]


class Stats:
    """Counters of one server; `service_s` is time in a slot, with latency and without queue wait.

    `span_s` is the time from the arrival of the first call to the end of the last one.
    """

    def __init__(self) -> None:
        self.pending_loads = 0
        self.waiting = 0
        self.in_service = 0
        self.clear()

    def clear(self) -> None:
        """Reset all counters except those of calls in flight."""
        self.routes: Counter[str] = Counter()
        self.statuses: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.served: Counter[str] = Counter()
        self.cancelled = 0
        self.loads = 0
        self.service_s = 0.0
        self.queue_wait_s = 0.0
        self.max_in_service = self.in_service
        self.first_s: float | None = None  # time.monotonic() at the first arrival and the last end
        self.last_s = 0.0

    def arrive(self) -> None:
        """Count a call that waits for a slot."""
        self.waiting += 1
        if self.first_s is None:
            self.first_s = time.monotonic()

    def begin(self, *, waited_s: float) -> None:
        """Count a call that has got its slot."""
        self.queue_wait_s += waited_s
        self.in_service += 1
        self.max_in_service = max(self.max_in_service, self.in_service)

    def end(self, *, service_s: float, model: str, finished: bool) -> None:
        """Count a call that has left its slot; `finished` is False if its client closed the connection."""
        self.in_service -= 1
        self.service_s += service_s
        self.last_s = time.monotonic()
        if finished:
            self.served[model] += 1

    def snapshot(self) -> dict[str, Any]:
        """Return all counters as plain JSON types."""
        return {
            "requests": sum(self.routes.values()),
            "routes": dict(self.routes),
            "statuses": dict(self.statuses),
            "faults": dict(self.faults),
            "calls": sum(self.served.values()),
            "calls_by_model": dict(self.served),
            "cancelled": self.cancelled,
            "loads": self.loads,
            "service_s": self.service_s,
            "queue_wait_s": self.queue_wait_s,
            "pending_loads": self.pending_loads,
            "waiting": self.waiting,
            "in_service": self.in_service,
            "max_in_service": self.max_in_service,
            "span_s": self.last_s - self.first_s if self.first_s is not None and self.last_s else 0.0,
            "process_cpu_s": time.process_time(),
        }
