"""The comparison: methods with their intervals, verdict and warnings, the front, and the policy against each method.

Rates, differences and intervals are those of the evaluation's report in summary.json, or of a search for a plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from query_mutator.evaluation.comparison import BEST_SINGLE
from query_mutator.evaluation.summary import IDENTITY, PLAN, POLICY, warning_of
from query_mutator.files.pairs import pair_rows, paired_json
from query_mutator.report.questions import Evaluation
from query_mutator.stats.intervals import wilson_interval

_CHOSEN_ON = "Plans were chosen on these questions, so the success of a plan is too high; measure it with qm eval."
_OUT_OF_FOLD = "Figures are out of fold, by target, on the logged questions; on others measure the plan with qm eval."
SHORTEST_CALL_S = 1e-3  # of a model; a lookup in the cache takes less


def results_of(summary: Mapping[str, Any], evaluation: Evaluation, *, is_timed: bool = True) -> dict[str, Any]:
    """Return the comparison of an evaluation, or that of a search for a plan; without either, no method.

    Seconds are left out unless `is_timed`: those of recorded replies mean nothing.
    """
    if report := summary.get("eval"):
        methods, search = report["methods"], report.get("plan_search") or {}
        timed = methods if is_timed else ()
        return {
            **report,
            "seconds": {name: evaluation.mean(name, "seconds", least=SHORTEST_CALL_S) for name in timed},
            "plan": search["best"]["plan"] if search else None,
            "verdict": report["verdict"]["sentence"],
            "warnings": warning_of(report["n"]),
            "of": "held-out question",
            "front": [{**point, "success_ci": methods[point["method"]]["success_ci"]} for point in report["front"]],
            "paired": _paired(report, evaluation),
            "tags": report["by_group"],
            "p_right": _reliability(search),
        }
    if "plan" in summary:
        return _plan_results(summary["plan"], summary["search"])
    return {"methods": {}, "warnings": [], "n": 0, "front": [], "tags": {}}


def _plan_results(plan: Mapping[str, Any], search: Mapping[str, Any]) -> dict[str, Any]:
    """Return the results of a search for a plan, which read training questions only, or of what a log taught."""
    best, is_log = plan if plan["steps"] else search["best"], not search["calls"]
    in_calls = search["front"].values()  # the best plan within each number of calls per question
    points = {point["plan"]: point for point in (*filter(None, [search.get("original")]), *in_calls)}
    on_front = {point["plan"] for point in in_calls}
    found = {IDENTITY: search.get("original"), BEST_SINGLE: search.get("single"), PLAN: best}
    methods = {name: point for name, point in found.items() if point}
    if len(methods) > 1 and not best["steps"]:
        methods.popitem()
    return {
        "methods": methods,
        "verdict": search.get("verdict"),
        "warnings": [_OUT_OF_FOLD if is_log else _CHOSEN_ON],
        "n": plan["questions"],
        "of": "logged question" if is_log else "training question",
        "front": [{**point, "method": name, "on_front": name in on_front} for name, point in points.items()],
        "tags": {},
        "p_right": _reliability(search),
        "only_plan": True,
    }


def _reliability(search: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return how good P(right) is, with an interval for each bin; None where it was not learned."""
    quality = search.get("p_right") or {}
    counted = [(each, each["n"]) for each in quality.get("reliability", ())]
    bins = [{**each, "rate_ci": wilson_interval(round(each["rate"] * n), n)} for each, n in counted]
    return {**quality, "reliability": bins} if bins else None


def _paired(report: Mapping[str, Any], evaluation: Evaluation) -> list[dict[str, Any]]:
    """Return the policy against each other method, question by question."""
    rows, ours = [], evaluation.held_out[POLICY]
    for name, difference in report["policy_minus"].items():
        if name in evaluation.held_out:
            found, _ = pair_rows(ours, evaluation.held_out[name], interval=difference["success_ci"])
            rows.append({"method": name, **paired_json(found)})
    return rows
