"""The report of an evaluation from its outcomes: rates by method and by group of questions, front and verdict.

    n questions, M methods

Intervals resample what questions are about (`target_key`): questions about one object succeed and fail together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from query_mutator.data.split import target_key
from query_mutator.evaluation.outcomes import Outcome, action_counts, failure_kinds, mean, scored, unscored_rows
from query_mutator.evaluation.rejections import count_rewrites, rewrites_of
from query_mutator.evaluation.verdict import POLICY, recommend
from query_mutator.stats.intervals import Floats
from query_mutator.stats.paired import compare_pairs
from query_mutator.stats.resampling import mean_intervals, rate_intervals
from query_mutator.types import Question

__all__ = ["Results", "front", "summarize"]

EXAMPLES = 3  # of answers, where none is right


@dataclass(frozen=True, kw_only=True)
class Results:
    """Outcomes of M methods on questions [n] and on requests that should be refused."""

    questions: Sequence[Question]
    outcomes: Mapping[str, Sequence[Outcome]]  # M of [n]
    guard: Sequence[Question]
    guarded: Mapping[str, Sequence[Outcome]]

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each method and question, as plain JSON types."""
        sets = (("test", self.questions, self.outcomes), ("guard", self.guard, self.guarded))
        return [
            {"method": name, "set": label, **outcome.to_row(question)}
            for label, questions, by_method in sets
            for name, outcomes in by_method.items()
            for question, outcome in zip(questions, outcomes, strict=True)
        ]


def summarize(
    results: Results, *, groups: Mapping[str, Sequence[bool]] | None = None, is_plan: bool = False
) -> dict[str, Any]:
    """Return the report as plain JSON types; `groups` are further parts of the questions [n], next to their tags.

    `is_plan`: the policy is a plan.
    """
    methods = list(results.outcomes)
    if not methods:
        raise ValueError("there is no method to summarize")
    keys = [target_key(question) for question in results.questions]
    right = _columns(results.outcomes, "is_right")  # [n, M]
    summaries = _summaries(results, keys, right)
    tags = sorted({tag for question in results.questions for tag in question.tags})
    parts = {tag: [tag in question.tags for question in results.questions] for tag in tags}

    @cache
    def minus(ours: str, theirs: str) -> dict[str, Any]:
        return _difference(right[:, methods.index(ours)], right[:, methods.index(theirs)], keys)

    baselines = [name for name in methods if name != POLICY] if POLICY in methods else []
    return {
        "n": len(results.questions),
        "methods": summaries,
        "policy_minus": {name: minus(POLICY, name) for name in baselines},
        "by_tag": _by_group(parts, right, methods, keys),
        "by_group": _by_group(groups or {}, right, methods, keys),
        "front": front(summaries),
        "verdict": recommend(summaries, minus, is_plan=is_plan),
        "examples": [] if np.nansum(right) else _examples(results),
        "policy_actions": action_counts(results.outcomes.get(POLICY, ())),
        "rewrites": count_rewrites(
            rewrites_of(
                pair for found in results.outcomes.values() for pair in zip(results.questions, found, strict=True)
            )
        ),
        "unscored": unscored_rows(
            {**results.outcomes, **{f"{name}, guard": found for name, found in results.guarded.items()}}
        ),
    }


def _columns(outcomes: Mapping[str, Sequence[Outcome]], name: str) -> Floats:
    """Return a field of the outcomes of M methods as columns [n, M], NaN where a question is unscored."""
    rows = [[math.nan if o.error else float(getattr(o, name)) for o in found] for found in outcomes.values()]
    return np.array(rows, dtype=np.float64).T


def _summaries(results: Results, keys: Sequence[str], right: Floats) -> dict[str, Any]:
    """Return rates, means and 95 % intervals of each method over its scored questions; NaN where there are none."""
    score, refused = _columns(results.outcomes, "score"), _columns(results.outcomes, "refused")
    of_guard = _columns(results.guarded, "refused")
    calls = mean_intervals(_columns(results.outcomes, "calls"), keys)
    guard_keys = [target_key(question) for question in results.guard]
    intervals = {
        "success": rate_intervals(right, keys),
        "score": np.clip(mean_intervals(score, keys), 0.0, 1.0).tolist(),
        "false_refusal": rate_intervals(refused, keys),
        "guard_refusal": rate_intervals(of_guard, guard_keys),
    }
    columns = {"success": right, "score": score, "false_refusal": refused, "guard_refusal": of_guard}
    summaries = {}
    for place, (name, outcomes) in enumerate(results.outcomes.items()):
        means = {measure: _mean(column[:, place]) for measure, column in columns.items()}
        summaries[name] = {
            "scored": len(scored(outcomes)),
            "unscored": failure_kinds(outcomes),
            "guard_unscored": failure_kinds(results.guarded[name]),
            **means,
            **{f"{measure}_ci": list(intervals[measure][place]) for measure in means},
            **{f"{cost}_per_question": mean(outcomes, cost) for cost in ("calls", "target_calls", "tokens")},
            "calls_per_question_ci": calls[place].tolist(),
        }
    return summaries


def _mean(values: Floats) -> float:
    return math.nan if np.isnan(values).all() else float(np.nanmean(values))


def _difference(ours: Floats, theirs: Floats, keys: Sequence[str]) -> dict[str, Any]:
    """Return the difference of success [n] and its interval over the questions that both scored."""
    found = compare_pairs(ours, theirs, keys)
    return {"success": found.difference, "success_ci": list(found.interval), "questions": found.questions}


def _by_group(
    parts: Mapping[str, Sequence[bool]], right: Floats, methods: Sequence[str], keys: Sequence[str]
) -> dict[str, Any]:
    """Return success with intervals of each method in each part of the questions."""
    if not parts:
        return {}
    columns = np.hstack([np.where(np.array(part)[:, None], right, math.nan) for part in parts.values()])
    intervals = iter(rate_intervals(columns, keys))
    found = {}
    for (name, part), rates in zip(parts.items(), np.split(columns, len(parts), axis=1), strict=True):
        of_methods = {
            method: {"success": _mean(column), "success_ci": list(next(intervals))}
            for method, column in zip(methods, rates.T, strict=True)
        }
        found[name] = {"n": int(np.sum(part)), "methods": of_methods}
    return found


def front(summaries: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return success against total calls, cheapest first; `on_front`: no method is better for as few calls."""
    points = [
        {"method": name, "calls": summary["calls_per_question"], "success": summary["success"]}
        for name, summary in summaries.items()
        if summary["scored"]
    ]
    points.sort(key=lambda point: (point["calls"], -point["success"]))
    best = -1.0
    for point in points:
        point["on_front"] = point["success"] > best
        best = max(best, point["success"])
    return points


def _examples(results: Results) -> list[dict[str, Any]]:
    """Return the first answers of the last method next to what would have been accepted."""
    *_, outcomes = results.outcomes.values()
    pairs = [pair for pair in zip(results.questions, outcomes, strict=True) if pair[1].error is None]
    return [
        {"question": q.text, "answer": o.answer, "accepted": list(q.accept) or [q.reference or ""]}
        for q, o in pairs[:EXAMPLES]
    ]
