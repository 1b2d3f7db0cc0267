"""What the proxy counts for Prometheus."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from query_mutator.types import MAX_NAME_CHARS

#: Upper bounds of the histograms, in seconds.
BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_BOUNDS = (*((bound, str(bound)) for bound in BUCKETS), (float("inf"), "+Inf"))
_HELP: Mapping[str, tuple[str, str]] = {
    "qm_requests_total": ("counter", "Requests by route and status code."),
    "qm_decisions_total": ("counter", "Requests to virtual models by decision and reason."),
    "qm_calls_total": ("counter", "Calls to models by purpose."),
    "qm_rewrites_total": ("counter", "Rewrites asked in the place of the question, by operator."),
    "qm_rejected_rewrites_total": ("counter", "Rewrites that were not used, by operator and guard."),
    "qm_in_flight": ("gauge", "Calls at the upstream, by model."),
    "qm_request_seconds": ("histogram", "Seconds until the reply of a virtual model is complete, by mode."),
    "qm_first_byte_seconds": ("histogram", "Seconds until its first byte, by mode."),
    "qm_feedback_right": ("summary", "Replies with feedback, and how many of them were right."),
    "qm_feedback_p_right": ("summary", "P(right) of replies with feedback, before it."),
}

Labels = tuple[tuple[str, str], ...]


class Metrics:
    """The counters of one proxy."""

    def __init__(self) -> None:
        self._counters: dict[str, dict[Labels, float]] = defaultdict(lambda: defaultdict(int))
        self._in_flight: Counter[str] = Counter()

    def count(self, name: str, amount: float = 1, /, **labels: str) -> None:
        """Add to a counter."""
        self._counters[name][tuple(labels.items())] += amount

    def observe(self, name: str, seconds: float, **labels: str) -> None:
        """Add a duration to a histogram."""
        buckets, key = self._counters[f"{name}_bucket"], tuple(labels.items())
        for bound, written in _BOUNDS:
            buckets[*key, ("le", written)] += int(seconds <= bound)
        self.count(f"{name}_sum", seconds, **labels)
        self.count(f"{name}_count", **labels)

    @contextmanager
    def calling(self, model: str) -> Iterator[None]:
        """Count a call to a model as in flight; a model without calls leaves, as clients choose the names."""
        model = model[:MAX_NAME_CHARS]
        self._in_flight[model] += 1
        try:
            yield
        finally:
            self._in_flight[model] -= 1
            if not self._in_flight[model]:
                del self._in_flight[model]

    def prometheus(self) -> str:
        """Return the text exposition format, version 0.0.4."""
        self._counters["qm_in_flight"] = {(("model", model),): number for model, number in self._in_flight.items()}
        lines = list[str]()
        for name, (kind, text) in _HELP.items():
            lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
            for series in (name, f"{name}_bucket", f"{name}_sum", f"{name}_count"):
                lines += [f"{series}{_written(labels)} {value}" for labels, value in self._counters[series].items()]
        return "\n".join([*lines, ""])


def _written(labels: Iterable[tuple[str, str]]) -> str:
    pairs = (f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in sorted(labels))
    return "{" + ",".join(pairs) + "}"
