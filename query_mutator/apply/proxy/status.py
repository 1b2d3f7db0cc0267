"""What the proxy counts for Prometheus: requests, rewrites, calls, latency, and pairs of the shadow."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from query_mutator.apply.proxy.queue import Counts, Queue

__all__ = ["Status"]

#: Upper bounds of the histogram of seconds.
BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_HELP: Mapping[str, tuple[str, str]] = {
    "qm_requests_total": ("counter", "Requests by route and status code."),
    "qm_decisions_total": ("counter", "Requests to virtual models by decision and reason."),
    "qm_calls_total": ("counter", "Calls to models by purpose."),
    "qm_rewrites_total": ("counter", "Rewrites asked in the place of the question, by operator."),
    "qm_rejected_rewrites_total": ("counter", "Rewrites that were not used, by operator and guard."),
    "qm_shadow_total": ("counter", "Questions that were to be answered both ways, by what became of them."),
    "qm_in_flight": ("gauge", "Calls at the upstream, by model."),
    "qm_waiting": ("gauge", "Calls waiting for a slot, by model."),
    "qm_request_seconds": ("histogram", "Seconds until the reply of a virtual model is complete, by mode."),
    "qm_first_byte_seconds": ("histogram", "Seconds until its first byte, by mode."),
}

Labels = tuple[tuple[str, str], ...]


@dataclass
class _Histogram:
    counts: list[int] = field(default_factory=lambda: [0] * len(BUCKETS))
    total: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        self.total += value
        self.count += 1
        for place, bound in enumerate(BUCKETS):
            if value <= bound:
                self.counts[place] += 1


class Status:
    """The counters of one proxy."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        self.started = time.time()
        self._counters: dict[str, Counter[Labels]] = defaultdict(Counter)
        self._histograms: dict[tuple[str, Labels], _Histogram] = defaultdict(_Histogram)

    def count(self, name: str, amount: int = 1, **labels: str) -> None:
        """Add to a counter."""
        self._counters[name][tuple(sorted(labels.items()))] += amount

    def observe(self, name: str, seconds: float, **labels: str) -> None:
        """Add a duration to a histogram."""
        self._histograms[name, tuple(sorted(labels.items()))].add(seconds)

    def prometheus(self, calls: Counts) -> str:
        """Return the text exposition format, version 0.0.4; `calls` are those of the queue now."""
        return "\n".join([*self._lines(calls), ""])

    def _lines(self, calls: Counts) -> Iterator[str]:
        for name, (kind, text) in _HELP.items():
            yield f"# HELP {name} {text}"
            yield f"# TYPE {name} {kind}"
            for labels, value in self._counters[name].items():
                yield f"{name}{_written(labels)} {value}"
            for model, counts in calls.items():
                if (gauge := name.removeprefix("qm_")) in counts:
                    yield f"{name}{_written((('model', model),))} {counts[gauge]}"
            for (found, labels), histogram in self._histograms.items():
                if found == name:
                    yield from _histogram_lines(name, labels, histogram)


def _histogram_lines(name: str, labels: Labels, histogram: _Histogram) -> Iterator[str]:
    for bound, count in zip((*BUCKETS, "+Inf"), (*histogram.counts, histogram.count), strict=True):
        yield f"{name}_bucket{_written((*labels, ('le', str(bound))))} {count}"
    yield f"{name}_sum{_written(labels)} {histogram.total:.6f}"
    yield f"{name}_count{_written(labels)} {histogram.count}"


def _written(labels: Labels) -> str:
    if not labels:
        return ""
    escaped = (value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n") for _, value in labels)
    return "{" + ",".join(f'{name}="{value}"' for (name, _), value in zip(labels, escaped, strict=True)) + "}"
