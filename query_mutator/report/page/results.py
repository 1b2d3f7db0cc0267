"""The sections on the comparison: the answer, success against calls, the paired table, success by tag.

Rates, differences and intervals are those of the evaluation's report in summary.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from query_mutator.evaluation.comparison import BEST_OF_K, BEST_SINGLE
from query_mutator.evaluation.outcomes import rejections_in_words
from query_mutator.evaluation.summary import IDENTITY, PLAN, POLICY, front, warning_of
from query_mutator.report.page.questions import Evaluation
from query_mutator.runs.pairs import pair_rows, paired_json
from query_mutator.stats.intervals import wilson_interval

_CHOSEN_ON = "Plans were chosen on these questions, so the success of a plan is too high; measure it with qm eval."
_OUT_OF_FOLD = "Figures are out of fold, by target, on the logged questions; on others measure the plan with qm eval."
_OFTEN_REJECTED = 0.05  # of an operator's rewrites
_RATES = ("success", "success_ci", "score", "false_refusal", "false_refusal_ci", "guard_refusal", "guard_refusal_ci")


def results_of(
    report: Mapping[str, Any] | None, summary: Mapping[str, Any], evaluation: Evaluation
) -> dict[str, Mapping[str, Any]]:
    """Return the sections by name; without an evaluation an answer that is empty, or that of a search for a plan."""
    if report:
        methods = report["methods"]
        points = [{**point, "success_ci": methods[point["method"]]["success_ci"]} for point in report["front"]]
        parts = {**report["by_group"], **report["by_tag"]}
        return {
            "answer": _answer(report, evaluation),
            "front": {"points": points},
            "paired": _paired(report, evaluation),
            "tags": {"tags": [{"tag": name, **found} for name, found in parts.items()]},
        }
    if "plan" in summary:
        plan, search = summary["plan"], summary["search"]
        shown = _plan_front(search) if search["calls"] else _log_front(search)
        quality = search.get("p_right") or {}
        bins = [
            {**each, "rate_ci": wilson_interval(round(each["rate"] * each["n"]), each["n"])}
            for each in quality.get("reliability", ())
        ]
        p_right = {"p_right": {**quality, "reliability": bins}} if bins else {}
        return {"answer": _plan_answer(plan, search), "front": {"points": shown}, **p_right}
    return {"answer": {"methods": [], "verdict": None, "warnings": [], "n": 0}}


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
            **({"note": "k tries, a vote"} if name == BEST_OF_K else {}),
        }
        for name, found in report["methods"].items()
    ]
    search = report.get("plan_search")
    return {
        "methods": methods,
        "plan": search and search["best"]["plan"],
        "verdict": report["verdict"]["sentence"],
        "warnings": _warnings(report),
        "n": report["n"],
        "questions": "held-out question",
    }


def _plan_answer(plan: Mapping[str, Any], search: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer of a search for a plan, which read training questions only, or of what a log taught."""
    best = plan if plan["steps"] else search["best"]
    found = {IDENTITY: search.get("original"), BEST_SINGLE: search.get("single"), PLAN: best}
    unknown = dict.fromkeys((*_RATES, "tokens", "seconds"))
    rows = [
        {
            **unknown,
            **{key: point[key] for key in ("success", "success_ci", "score", "calls")},
            "scored": point["questions"],
            "unscored": 0,
            "method": name,
        }
        for name, point in found.items()
        if point
    ]
    if len(rows) > 1 and not best["steps"]:
        rows.pop()
    is_log = not search["calls"]
    return {
        "methods": rows,
        "verdict": search.get("verdict"),
        "warnings": [_OUT_OF_FOLD if is_log else _CHOSEN_ON],
        "n": plan["questions"],
        "questions": "logged question" if is_log else "training question",
        "step": None,
        "only_plan": True,
    }


def _plan_front(search: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the original question and the best plan within each number of calls per question."""
    found = [search["original"]] if "original" in search else []
    plans = {point["plan"]: point for point in (*found, *search["front"].values())}
    best = {point["plan"] for point in search["front"].values()}
    return [
        {"method": name, **{key: point[key] for key in ("calls", "success", "success_ci")}, "on_front": name in best}
        for name, point in plans.items()
    ]


def _log_front(search: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return submissions by P(right) and by plain votes, as far as the table of a log goes."""
    n, rows = search["best"]["questions"], search["by_calls"]
    by_p = {f"by P(right), {row['calls']:g}": (row["learned_calls"], row["learned"]) for row in rows}
    votes = {f"vote of {row['calls']:g}": (row["learned_calls"], row["vote"]) for row in rows if row["calls"] >= 2}
    found = {
        name: {"calls_per_question": calls, "success": rate, "scored": n}
        for name, (calls, rate) in (by_p | votes).items()
    }
    return [{**point, "success_ci": wilson_interval(round(point["success"] * n), n)} for point in front(found)]


def _warnings(report: Mapping[str, Any]) -> list[str]:
    """Return what a reader must know before the numbers are believed."""
    methods, n = report["methods"], report["n"]
    lines, asked = [*warning_of(n)], report.get("asked", n)
    if report.get("available", asked) > asked:
        calls = report["eval_calls"]
        lines.append(f"{asked} of {report['available']} questions were asked, as many as {calls:,} calls allow.")
    if asked > n:
        lines.append(f"{asked - n} more questions were not finished by all methods.")
    for name, found in methods.items():
        if count := sum(found["unscored"].values()):
            kinds = ", ".join(f"{kind} ×{number}" for kind, number in found["unscored"].items())
            lines.append(f"{name}: {count} of {n} questions are unscored and in no rate ({kinds}).")
    original = methods.get(IDENTITY, {}).get("guard_refusal")
    for name, found in methods.items():
        refused = found["guard_refusal"]
        if None not in (original, refused) and refused < original:
            lines.append(
                f"{name} refuses {100 * refused:.1f} % of the requests that should be refused, the original question "
                f"{100 * original:.1f} %."
            )
    often = {
        name: found
        for name, found in report["rewrites"].items()
        if sum(found["rejected"].values()) >= _OFTEN_REJECTED * found["rewrites"]
    }
    if rejected := rejections_in_words(often):
        lines.append(f"Guards: {rejected}.")
    return [*lines, "One seed: the intervals say nothing about other seeds."]


def _paired(report: Mapping[str, Any], evaluation: Evaluation) -> dict[str, Any]:
    """Return the policy against each other method, question by question."""
    baselines = [name for name in report["policy_minus"] if name in evaluation.methods]
    ours, rows = evaluation.held_out(POLICY), []
    for name in baselines:
        low, high = report["policy_minus"][name]["success_ci"]
        found, _ = pair_rows(ours, evaluation.held_out(name), interval=(low, high))
        rows.append({"baseline": name, **paired_json(found)})
    return {"rows": rows}
