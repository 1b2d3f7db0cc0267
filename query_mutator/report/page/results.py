"""The sections on the comparison: the answer, success against calls, the paired table, success by tag.

Rates, differences and intervals are those of the evaluation's report in summary.json.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from query_mutator.evaluation.summary import IDENTITY, PLAN, POLICY, front
from query_mutator.report.page.questions import Evaluation
from query_mutator.runs.pairs import pair_rows

__all__ = ["results_of"]

FEW_QUESTIONS = 100  # below it the smallest difference that means something is said
_DISCORDANT = 1 / 3  # share of the questions on which two methods usually differ
_Z95 = 1.96
_RATES = ("success", "success_ci", "score", "false_refusal", "false_refusal_ci", "guard_refusal", "guard_refusal_ci")


def results_of(
    report: Mapping[str, Any] | None, summary: Mapping[str, Any], evaluation: Evaluation
) -> dict[str, Mapping[str, Any]]:
    """Return the sections by name; without an evaluation an answer that is empty, or that of a search for a plan."""
    if report:
        report = _completed(report)
        return {
            "answer": _answer(report, evaluation),
            "front": _front(report),
            "paired": _paired(report, evaluation),
            "tags": _tags(report),
        }
    if "plan" in summary:
        return {"answer": _plan_answer(summary["plan"]), "front": _plan_front(summary["search"])}
    return {"answer": {"methods": [], "verdict": None, "warnings": [], "n": 0}}


def _completed(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return a report with what those of the first version lack."""
    unknown = {**dict.fromkeys(_RATES), "scored": report["n"], "unscored": {}, "tokens_per_question": None}
    methods = {name: unknown | found for name, found in report["methods"].items()}
    missing: dict[str, Any] = {"policy_minus": {}, "by_tag": {}, "by_group": {}}
    return {**missing, "front": front(methods), **report, "methods": methods}


def _answer(report: Mapping[str, Any], evaluation: Evaluation) -> dict[str, Any]:
    """Return methods, verdict and warnings of a report."""
    methods = [
        {
            "method": name,
            **{key: found[key] for key in _RATES},
            "calls": found["calls_per_question"],
            "tokens": found["tokens_per_question"],
            "seconds": evaluation.seconds(name),
            "scored": found["scored"],
            "unscored": sum(found["unscored"].values()),
        }
        for name, found in report["methods"].items()
    ]
    return {
        "methods": methods,
        "verdict": _verdict(report),
        "warnings": _warnings(report),
        "n": report["n"],
    }


def _plan_answer(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer of a search for a plan, which read training questions only."""
    low, high = plan["success_ci"]
    rate = f"right on {_percent(plan['success'])} of {plan['questions']} training questions"
    interval = f"(95 % interval {100 * low:.1f} to {100 * high:.1f})"
    unknown = dict.fromkeys((*_RATES, "tokens", "seconds"))
    row = unknown | {name: plan[name] for name in ("success", "success_ci", "score", "calls")}
    return {
        "methods": [{**row, "method": PLAN, "scored": plan["questions"], "unscored": 0}],
        "verdict": f"The plan {plan['plan']}: {rate} {interval}, at {plan['calls']:.1f} calls per question.",
        "warnings": ["It was chosen on these questions, so the rate is too high; measure it with qm eval."],
        "n": plan["questions"],
    }


def _plan_front(search: Mapping[str, Any]) -> dict[str, Any]:
    """Return the best plan within each number of calls per question."""
    plans = {point["plan"]: point for point in search["front"].values()}
    points = [{"method": name, **{key: point[key] for key in ("calls", "success", "success_ci")}, "on_front": True}
              for name, point in plans.items()]  # fmt: skip
    return {"points": points}


def _verdict(report: Mapping[str, Any]) -> str:
    """Return one sentence on the policy and its baselines, by the intervals of the paired differences."""
    methods, differences = report["methods"], report["policy_minus"]
    known = {name: found for name, found in differences.items() if found["success"] is not None}
    known = {name: found for name, found in known.items() if math.isfinite(found["success"])}
    if not known:
        return "No verdict: no question was scored for the policy and another method."
    rate = f"the policy is right on {_percent(methods[POLICY]['success'])} of {report['n']} held-out questions"
    ahead = [name for name, found in known.items() if found["success_ci"][1] < 0]
    level = [name for name, found in known.items() if found["success_ci"][0] <= 0 <= found["success_ci"][1]]
    baselines, how = (ahead, "Worse than") if ahead else (level, "No better than")
    if baselines:
        best = max(baselines, key=lambda name: methods[name]["success"])
        its = f"{best} on {_percent(methods[best]['success'])}"
        return f"{how} {_listed(baselines)}: {rate}, {its}; the difference is {_points(known[best])}."
    closest = min(known, key=lambda name: known[name]["success"])
    return f"Better than every other method: {rate}; {closest} is the closest, the lead is {_points(known[closest])}."


def _warnings(report: Mapping[str, Any]) -> list[str]:
    """Return what a reader must know before the numbers are believed."""
    methods, n = report["methods"], report["n"]
    lines = []
    if 0 < n < FEW_QUESTIONS:
        points = min(100, round(100 * _Z95 * math.sqrt(_DISCORDANT / n)))
        lines.append(f"{n} held-out question{'s' * (n > 1)}: differences under {points} points mean nothing.")
    if report.get("asked", n) > n:
        lines.append(f"{report['asked'] - n} more questions were not finished by all methods.")
    for name, found in methods.items():
        if count := sum(found["unscored"].values()):
            kinds = ", ".join(f"{kind} ×{number}" for kind, number in found["unscored"].items())
            lines.append(f"{name}: {count} of {n} questions are unscored and in no rate ({kinds}).")
    original = methods.get(IDENTITY, {}).get("guard_refusal")
    for name, found in methods.items():
        refused = found["guard_refusal"]
        if None not in (original, refused) and refused < original:
            lines.append(
                f"{name} refuses {_percent(refused)} of the requests that should be refused, the original question "
                f"{_percent(original)}."
            )
    return [*lines, "One seed: the intervals say nothing about other seeds."]


def _front(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return success against total calls of each method."""
    intervals = {name: found["success_ci"] for name, found in report["methods"].items()}
    return {"points": [{**point, "success_ci": intervals[point["method"]]} for point in report["front"]]}


def _paired(report: Mapping[str, Any], evaluation: Evaluation) -> dict[str, Any]:
    """Return the policy against each other method, question by question."""
    baselines = [name for name in report["policy_minus"] if name in evaluation.methods]
    ours, rows = evaluation.held_out(POLICY), []
    for name in baselines:
        low, high = report["policy_minus"][name]["success_ci"]  # by target, which rows of earlier versions do not name
        pair = pair_rows(ours, evaluation.held_out(name), interval=(low, high))
        rows.append({"baseline": name, **pair.to_json()})
    return {"rows": rows}


def _tags(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return success by tag, and by group where the report has groups."""
    parts = {**report["by_group"], **report["by_tag"]}
    return {"tags": [{"tag": name, **found} for name, found in parts.items()]}


def _percent(rate: float) -> str:
    return f"{100 * rate:.1f} %"


def _points(difference: Mapping[str, Any]) -> str:
    low, high = difference["success_ci"]
    return f"{100 * difference['success']:+.1f} points (95 % interval {100 * low:+.1f} to {100 * high:+.1f})"


def _listed(names: Sequence[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
