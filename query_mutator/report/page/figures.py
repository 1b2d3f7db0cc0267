"""The sections on learning and calls: metrics.jsonl, the steps that failed, and what tokens cost at given prices."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from query_mutator.evaluation.comparison import BEST_SINGLE, RANDOM
from query_mutator.evaluation.summary import IDENTITY, PLAN
from query_mutator.files.metrics import METRICS
from query_mutator.report.page.messages import Message
from query_mutator.report.page.questions import Evaluation
from query_mutator.stats.intervals import wilson_interval

#: Title and metric keys of each chart; keys that a run did not log are left out.
CHARTS = (
    ("Return", ("charts/episodic_return",)),
    ("Success on validation questions", ("validation/success", "validation/success_low", "validation/success_high")),
    ("Success of training episodes", ("charts/success", "charts/baseline_success")),
    ("Policy loss", ("losses/policy_loss",)),
    ("Value loss", ("losses/value_loss", "losses/td_loss")),
    ("Entropy", ("losses/entropy",)),
    ("KL divergence", ("losses/approx_kl",)),
    ("Explained variance", ("losses/explained_variance",)),
    ("Gradient norm", ("grads/norm_before_clip_median", "grads/norm_before_clip_max")),
    ("Learning rate", ("charts/learning_rate",)),
    ("Calls per second", ("llm/calls_per_s",)),
    ("Latency of a call", ("llm/latency_s", "llm/queue_wait_s")),
)
_LINES = (IDENTITY, RANDOM, BEST_SINGLE, PLAN)
_LENGTHS = (50, 100, 200, 400, 800)  # characters of a question, upper ends of the groups
_TOTALS = (
    "llm/calls", "llm/failed_calls", "llm/retries", "llm/invalid_steps", "llm/cut_replies", "llm/prompts_too_long",
    "counters/tokens", "llm/tokens_saved", "llm/shared_calls", "llm/cache_hits", "llm/limit",
)  # fmt: skip
_RESTARTED = ("llm/failed_calls", "llm/retries", "llm/shared_calls", "llm/cache_hits", "llm/tokens_saved")
_MEANS = ("llm/calls_per_s", "llm/latency_s", "llm/queue_wait_s", "llm/tokens_per_call", "llm/reply_tokens_per_call")
_MILLION = 1e6
_QUESTIONS = 1000
Tokens = tuple[float, float | None]  # of prompts and replies together; of the replies, None where they were not logged


class Figures:
    """The rows of metrics so far, as sums; and the training steps that failed."""

    def __init__(self) -> None:
        self.keys: dict[str, None] = {}  # in the order in which they appeared
        self.last: dict[str, float] = {}
        self._sums: dict[str, float] = defaultdict(float)  # of the means, weighted by calls
        self._weights: dict[str, float] = defaultdict(float)
        self._before: dict[str, float] = defaultdict(float)  # counted by earlier parts of a resumed run
        self._in_flight = 0.0
        self._calls = 0.0
        self._failures: Counter[tuple[str, str]] = Counter()  # by kind and operator
        self._lengths: Counter[int] = Counter()
        self._invalid: Counter[int] = Counter()

    def metrics(self, run: int, rows: Sequence[Mapping[str, Any]]) -> Message:
        """Add the rows of a run; return the message that adds them to the page."""
        full = [_with_interval(row) for row in rows]
        for row in full:
            self._add(row)
        keys = dict.fromkeys(key for row in full for key in row if key not in ("step", "wall_s"))
        self.keys |= keys
        return {
            "kind": "metrics",
            "run": run,
            "steps": [row["step"] for row in full],
            "wall_s": [row.get("wall_s") for row in full],
            "columns": {key: [row.get(key) for row in full] for key in keys},
        }

    def _add(self, row: Mapping[str, Any]) -> None:
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

    def add_step(self, row: Mapping[str, Any]) -> None:
        """Add a row of transcripts.jsonl."""
        group = bisect_left(_LENGTHS, len(row["question"]))
        self._lengths[group] += 1
        if not row["valid"]:
            self._invalid[group] += 1
            kind = (row["error"] or {}).get("kind", "unknown")
            self._failures[str(kind), str(row["operator"])] += 1

    def calls(self, *, server: str, summary: Mapping[str, Any]) -> dict[str, Any]:
        """Return the section on calls; `server` is where they went."""
        rows = [_row(key, self.last[key] + self._before[key]) for key in _TOTALS if key in self.last]
        rows += [_row(key, self._mean(key)) for key in _MEANS]
        latency, wait = self._mean("llm/latency_s"), self._mean("llm/queue_wait_s")
        if latency is not None and wait is not None:
            rows.append(
                _figure("service time", latency - wait, "s", "mean latency of a call less its wait in the queue")
            )
        if self._calls and "llm/limit" in self.last:
            busy = self._in_flight / self._calls
            meaning = "mean, by Little's law: calls per second times latency"
            rows.append(_figure("calls in flight", busy, "calls", meaning))
            rows.append(
                _figure("share of the limit", busy / self.last["llm/limit"], "share", "calls in flight / limit")
            )
        if "eval_llm_calls" in summary:
            value = summary["eval_llm_calls"]
            rows.append(_figure("calls of evaluations", value, "calls", "periodic and final, those of the cache apart"))
        failures = [
            {"kind": kind, "operator": operator, "server": server, "count": count}
            for (kind, operator), count in self._failures.most_common()
        ]
        lengths = [
            {
                "from": 0 if group == 0 else _LENGTHS[group - 1] + 1,
                "to": (*_LENGTHS, None)[group],
                "steps": self._lengths[group],
                "invalid": self._invalid[group],
            }
            for group in sorted(self._lengths)
        ]
        shown = [row for row in rows if row["value"] is not None]
        return {"rows": shown, "failures": failures, "invalid_by_length": lengths}

    @property
    def tokens(self) -> Tokens:
        """Return the tokens of the training so far."""
        total, each = self.last.get("counters/tokens", 0.0), self._mean("llm/tokens_per_call")
        reply = self._mean("llm/reply_tokens_per_call")
        return total, total * reply / each if each and reply is not None else None

    def _mean(self, key: str) -> float | None:
        return self._sums[key] / self._weights[key] if self._weights[key] else None


def learning_of(figures: Figures, report: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the charts of a run, and the methods that its curve is to be compared with."""
    methods = (report or {}).get("methods", {})
    lines = [
        {"name": name, "success": methods[name]["success"], "of": "held-out questions"}
        for name in _LINES
        if name in methods and methods[name]["success"] is not None
    ]
    if (original := figures.last.get("validation/identity_success")) is not None:
        lines = [line for line in lines if line["name"] != IDENTITY]
        lines.insert(0, {"name": IDENTITY, "success": original, "of": "validation questions"})
    charts = []
    for title, keys in CHARTS:
        found = [key for key in keys if key in figures.keys]
        if found:
            charts.append({"title": title, "unit": METRICS[found[0]].unit, "keys": found})
    return {"lines": lines, "charts": charts}


def _with_interval(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of metrics with Wilson's interval of the success on validation questions."""
    rate, asked = row.get("validation/success"), row.get("validation/questions")
    if rate is None or not asked:
        return dict(row)
    n = int(asked - row.get("validation/unscored", 0))
    low, high = wilson_interval(min(n, round(rate * n)), n)
    return {**row, "validation/success_low": low, "validation/success_high": high}


def _row(key: str, value: float | None) -> dict[str, Any]:
    metric = METRICS[key]
    meaning = metric.meaning.replace("since the last row", "over the run")
    return _figure(key, value, metric.unit, meaning)


def _figure(name: str, value: float | None, unit: str, meaning: str) -> dict[str, Any]:
    return {"name": name, "value": value, "unit": unit, "meaning": meaning}


# --- cost ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """Prices per million tokens of prompts and of replies, in any currency."""

    prompt: float
    reply: float

    def of(self, tokens: Tokens) -> float | str:
        """Return the cost of tokens; its bounds, in words, where the replies' part of them is unknown."""
        total, reply = tokens
        if reply is not None:
            return ((total - reply) * self.prompt + reply * self.reply) / _MILLION
        low, high = sorted(total * price / _MILLION for price in (self.prompt, self.reply))
        return low if low == high else f"{low:.4g} to {high:.4g}; the replies' part of the tokens was not logged"


def cost_of(
    price: Price, *, training: Tokens, summary: Mapping[str, Any], evaluation: Evaluation
) -> dict[str, float | str]:
    """Return the costs by name: the training, its evaluations, and each method for 1,000 questions."""
    found: dict[str, float | str] = {
        "price of a million prompt tokens": price.prompt,
        "price of a million reply tokens": price.reply,
        "training": price.of(training),
    }
    if "eval_tokens" in summary:
        found["evaluations"] = price.of((summary["eval_tokens"], summary["eval_reply_tokens"]))
    for method in evaluation.methods:
        each = evaluation.tokens(method)
        if each is not None:
            total, reply = each
            several = _QUESTIONS * total, None if reply is None else _QUESTIONS * reply
            found[f"{method}, 1,000 questions"] = price.of(several)
    return found
