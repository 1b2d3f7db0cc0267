"""The results of a method on questions, and their summary: rates, means and 95 % intervals.

A question whose calls failed for good is unscored: it counts in no rate, and is reported with the reason.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from query_mutator.errors import TooManyFailuresError
from query_mutator.stats.intervals import mean_interval, paired_interval, wilson_interval
from query_mutator.types import ErrorInfo

__all__ = [
    "Outcome", "action_counts", "check_failures", "check_report", "difference", "failure_kinds", "mean", "scored",
    "summarize", "unscored_rows",
]  # fmt: skip

MAX_UNSCORED_ROWS = 20  # of a report; all are counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of one method on one question; with an `error` there is none, and the numbers are NaN or 0."""

    question_id: str
    success: float = math.nan
    score: float = math.nan
    refused: bool = False
    calls: int = 0
    target_calls: int = 0
    actions: tuple[str, ...] = ()
    rewrite: str = ""
    rewrites: tuple[str, ...] = ()
    answer: str = ""
    error: ErrorInfo | None = None  # why the question is unscored


def scored(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Return the outcomes without an error."""
    return [outcome for outcome in outcomes if outcome.error is None]


def mean(outcomes: Sequence[Outcome], name: str) -> float:
    """Return the mean of a field over the scored outcomes, NaN when there are none."""
    values = [getattr(outcome, name) for outcome in scored(outcomes)]
    return float(np.mean(values)) if values else math.nan


def summarize(outcomes: Sequence[Outcome], guarded: Sequence[Outcome]) -> dict[str, Any]:
    """Return rates, means and their 95 % intervals of one method over the scored questions; NaN where there are none.

    `guarded` are the outcomes on requests that should be refused.
    """
    found, on_guard = scored(outcomes), scored(guarded)
    successes = sum(outcome.success >= 0.5 for outcome in found)
    refused, guard_refused = sum(o.refused for o in found), sum(o.refused for o in on_guard)
    return {
        "scored": len(found),
        "unscored": failure_kinds(outcomes),
        "guard_unscored": failure_kinds(guarded),
        "success": _rate(successes, len(found)),
        "success_ci": list(wilson_interval(successes, len(found))),
        "score": mean(found, "score"),
        "score_ci": list(mean_interval([outcome.score for outcome in found], bounds=(0.0, 1.0))),
        "false_refusal": _rate(refused, len(found)),
        "false_refusal_ci": list(wilson_interval(refused, len(found))),
        "guard_refusal": _rate(guard_refused, len(on_guard)),
        "guard_refusal_ci": list(wilson_interval(guard_refused, len(on_guard))),
        "calls_per_question": mean(found, "calls"),
        "target_calls_per_question": mean(found, "target_calls"),
    }


def difference(ours: Sequence[Outcome], theirs: Sequence[Outcome]) -> dict[str, Any]:
    """Return the difference of success and its interval over the questions that both scored."""
    both = [(a.success, b.success) for a, b in zip(ours, theirs, strict=True) if a.error is None and b.error is None]
    mine, other = [a for a, _ in both], [b for _, b in both]
    return {
        "success": float(np.mean(np.subtract(mine, other))) if both else math.nan,
        "success_ci": list(paired_interval(mine, other, bounds=(-1.0, 1.0))),
        "questions": len(both),
    }


def check_failures(kinds: Mapping[str, int], asked: int, *, max_failure_rate: float) -> None:
    """Raise TooManyFailuresError when more than this share of the questions asked is unscored, `kinds` by reason."""
    failed = sum(kinds.values())
    if failed > max_failure_rate * asked:
        raise TooManyFailuresError(
            f"calls failed for good in {failed} of {asked} questions of the evaluation, most often "
            f"{max(kinds, key=lambda kind: kinds[kind])!r}; check the server, or allow more with --max-failure-rate"
        )


def check_report(report: Mapping[str, Any], *, max_failure_rate: float) -> None:
    """Raise TooManyFailuresError when too many held-out questions of all methods in a report are unscored."""
    kinds = sum((Counter(method["unscored"]) for method in report["methods"].values()), Counter())
    check_failures(kinds, report["n"] * len(report["methods"]), max_failure_rate=max_failure_rate)


def action_counts(outcomes: Sequence[Outcome]) -> Mapping[str, int]:
    """Return how often each action was taken."""
    names, counts = np.unique([name for o in outcomes for name in o.actions], return_counts=True)
    return {str(name): int(count) for name, count in zip(names, counts, strict=True)}


def unscored_rows(by_method: Mapping[str, Sequence[Outcome]]) -> list[dict[str, str]]:
    """Return method, question and reason of the first unscored questions."""
    rows = [
        {"method": name, "question_id": o.question_id, "kind": o.error.kind, "message": o.error.message}
        for name, outcomes in by_method.items()
        for o in outcomes
        if o.error is not None
    ]
    return rows[:MAX_UNSCORED_ROWS]


def failure_kinds(outcomes: Iterable[Outcome]) -> dict[str, int]:
    """Return how often each kind of failure left a question unscored, the most frequent first."""
    return dict(Counter(outcome.error.kind for outcome in outcomes if outcome.error is not None).most_common())


def _rate(count: int, n: int) -> float:
    return count / n if n else math.nan
