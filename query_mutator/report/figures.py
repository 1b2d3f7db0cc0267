"""Learning and calls: metrics.jsonl as curves and totals, and the steps that failed."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from query_mutator.evaluation.comparison import BEST_SINGLE, RANDOM
from query_mutator.evaluation.summary import IDENTITY, PLAN
from query_mutator.files.metrics import METRICS
from query_mutator.report.charts import axis, compact, thin
from query_mutator.stats import wilson_interval

VALIDATION = "validation/success"
#: Title and metric keys of each chart; keys that a run did not log are left out.
LEARNING = {
    "Success on validation questions": (VALIDATION,),
    "Return": ("charts/episodic_return",),
    "Success of training episodes": ("charts/success", "charts/baseline_success"),
    "Policy loss": ("losses/policy_loss",),
    "Value loss": ("losses/value_loss", "losses/td_loss"),
    "Entropy": ("losses/entropy",),
    "KL divergence": ("losses/approx_kl",),
    "Explained variance": ("losses/explained_variance",),
    "Gradient norm": ("grads/norm_before_clip_median", "grads/norm_before_clip_max"),
    "Learning rate": ("charts/learning_rate",),
}
CALLS = {"Calls per second": ("llm/calls_per_s",), "Latency of a call": ("llm/latency_s", "llm/queue_wait_s")}
_LINES = (IDENTITY, RANDOM, BEST_SINGLE, PLAN)
_TOTALS = (
    "llm/calls", "llm/failed_calls", "llm/retries", "llm/invalid_steps", "llm/cut_replies", "llm/prompts_too_long",
    "counters/tokens", "llm/shared_calls", "llm/cache_hits", "llm/limit",
)  # fmt: skip
_RESTARTED = ("llm/failed_calls", "llm/retries", "llm/shared_calls", "llm/cache_hits")
_MEANS = ("llm/tokens_per_call", "llm/reply_tokens_per_call", "llm/calls_per_s", "llm/latency_s", "llm/queue_wait_s")
_NUM_TIMES = 3  # of the means, the last ones


class Figures:
    """The rows of metrics so far, as sums; and the training steps that failed."""

    def __init__(self) -> None:
        self.rows: list[Mapping[str, Any]] = []
        self.last: dict[str, float] = {}
        self._sums: dict[str, float] = defaultdict(float)  # of the means, weighted by calls
        self._weights: dict[str, float] = defaultdict(float)
        self._before: dict[str, float] = defaultdict(float)  # counted by earlier parts of a resumed run
        self._in_flight = 0.0
        self._calls = 0.0
        self.failures: Counter[tuple[str, str]] = Counter()  # steps by kind and operator

    def add(self, row: Mapping[str, Any]) -> None:
        """Add a row of metrics.jsonl."""
        self.rows.append(row)
        for key in _RESTARTED:
            if key in row:
                restarted = row[key] < self.last.get(key, 0.0)
                self._before[key] += self.last.get(key, 0.0) if restarted else 0.0
        self.last |= row
        calls = max(0.0, row.get("llm/calls", self._calls) - self._calls)
        self._calls += calls
        for key in _MEANS:
            if key in row:
                self._sums[key] += calls * row[key]
                self._weights[key] += calls
        self._in_flight += calls * row.get("llm/calls_per_s", 0.0) * row.get("llm/latency_s", 0.0)

    def add_steps(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add rows of transcripts.jsonl."""
        failed = (row for row in rows if not row["valid"])
        self.failures.update(((row["error"] or {}).get("kind", "unknown"), row["operator"]) for row in failed)

    def calls(self, *, is_timed: bool = True) -> dict[str, float]:
        """Return the figures on calls; without times unless `is_timed`."""
        found = {key: self.last[key] + self._before[key] for key in _TOTALS if key in self.last}
        for key in _MEANS if is_timed else _MEANS[:-_NUM_TIMES]:
            if self._weights[key]:
                found[key] = self._sums[key] / self._weights[key]
        if "llm/latency_s" in found and "llm/queue_wait_s" in found:
            found["service time"] = found["llm/latency_s"] - found["llm/queue_wait_s"]
        if is_timed and self._calls and "llm/limit" in self.last:
            found["calls in flight"] = self._in_flight / self._calls
            found["share of the limit"] = found["calls in flight"] / self.last["llm/limit"]
        return found

    def curve(self, key: str) -> dict[str, Any] | None:
        """Return points and, of success on validation questions, Wilson's interval; None for what was not logged."""
        rows = thin([row for row in self.rows if row.get(key) is not None])
        band = [_band(row) for row in rows] if key == VALIDATION else []
        return {"points": [(row["step"], row[key]) for row in rows], "band": band} if rows else None

    def lines(self, methods: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the methods that success on validation questions is compared with."""
        known = {name: methods[name]["success"] for name in _LINES if name in methods}
        lines = [{"name": name, "success": rate, "of": "held-out"} for name, rate in known.items() if rate is not None]
        if (original := self.last.get("validation/identity_success")) is not None:
            lines = [line for line in lines if line["name"] != IDENTITY]
            lines.insert(0, {"name": IDENTITY, "success": original, "of": "validation"})
        return lines


def curves_of(
    charts: Mapping[str, Sequence[str]],
    runs: Sequence[tuple[str, str, Figures]],
    lines: Sequence[Mapping[str, Any]] = (),
) -> list[dict[str, Any]]:
    """Return the charts with a curve for each metric of each run, given by name and color; without empty ones.

    Success on validation questions is compared with the `lines`.
    """
    found = []
    for title, keys in charts.items():
        series = []
        for place, key in enumerate(keys):
            for name, color, figures in runs:
                if curve := figures.curve(key):
                    what = key.rpartition("/")[2].replace("_", " ")
                    named = [what] * (len(keys) > 1) + [name] * (len(runs) > 1)
                    shown = color if len(runs) > 1 or not place else f"var(--c{5 * place + 1})"
                    series.append({"name": " · ".join(named) or title, "color": shown, "dash": place > 0, **curve})
        if series:
            across = lines if keys[0] == VALIDATION else ()
            values = [value for each in series for _, *more in (*each["points"], *each["band"]) for value in more]
            values += [line["success"] for line in across]
            unit, steps = METRICS[keys[0]]["unit"], [step for each in series for step, _ in each["points"]]
            show, label = (_percent, "%") if unit == "share" else (compact, unit.removeprefix("1"))
            x = axis(steps, tight=True, whole=True, label="environment steps")
            y = axis(values, zero=bool(across), count=4, show=show, label=label, vertical=True)
            found.append({"title": title, "series": series, "lines": across, "x": x, "y": y})
    return found


def _percent(share: float | None) -> str:
    return compact(None if share is None else 100 * share)


def _band(row: Mapping[str, Any]) -> tuple[float, float, float] | tuple[()]:
    """Return step and Wilson's interval of the success on validation questions."""
    n = int(row.get("validation/questions", 0) - row.get("validation/unscored", 0))
    return (row["step"], *wilson_interval(min(n, round(row[VALIDATION] * n)), n)) if n > 0 else ()
