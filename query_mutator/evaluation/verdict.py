"""What to deploy: one sentence, made once and shown in the terminal, on the page and in summary.json.

    identity, plan, policy    from the simplest on; the next one is chosen where it is clearly better (the interval of
                              the paired difference lies above 0), and the policy also where it is not clearly worse
                              than the plan and makes clearly fewer calls

None may refuse fewer of the requests that should be refused than the original questions do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from query_mutator.stats.power import DISCORDANT

__all__ = ["FEW_QUESTIONS", "IDENTITY", "MIN_QUESTIONS", "PLAN", "POLICY", "recommend", "warning_of"]

IDENTITY, PLAN, POLICY = "identity", "best_plan", "policy"
_NAMES = {IDENTITY: "nothing (ask the original question)", PLAN: "the plan", POLICY: "the policy"}
MIN_QUESTIONS = 20  # scored by each; fewer decide nothing
FEW_QUESTIONS = 100  # below it the smallest difference that means something is said
FEWER_CALLS = 0.9  # of the plan's calls: a policy costs more to run and to explain than a plan
_Z95 = 1.96

Summaries = Mapping[str, Mapping[str, Any]]
#: The difference in success of two methods, {"success": ..., "success_ci": (low, high)}.
Minus = Callable[[str, str], Mapping[str, Any]]


def recommend(summaries: Summaries, minus: Minus, *, is_plan: bool = False) -> dict[str, Any]:
    """Return {"deploy": a method or None, "sentence": ...}; `is_plan`: the policy is a plan."""
    names = _NAMES | ({POLICY: _NAMES[PLAN]} if is_plan else {})
    found = {name: summaries[name] for name in _NAMES if name in summaries and summaries[name]["scored"]}
    if IDENTITY not in found:
        return {"deploy": None, "sentence": "No verdict: the original questions have no scored answers."}
    lowest = found[IDENTITY]["guard_refusal"]
    unsafe = [name for name, summary in found.items() if summary["guard_refusal"] < lowest]
    warnings = "".join(f"; {names[name]} answers requests that should be refused" for name in unsafe)
    asked = min(summary["scored"] for summary in found.values())
    if asked < MIN_QUESTIONS:
        few = f"{asked} question{'s are' if asked > 1 else ' is'} too few, give {MIN_QUESTIONS} or more"
        return {"deploy": None, "sentence": f"No verdict: {few}{warnings}."}
    safe = {name: summary for name, summary in found.items() if name not in unsafe}
    deploy = _chosen(safe, minus)
    others = _others(deploy, safe, summaries, minus, names)
    summary = safe[deploy]
    rate = f"{100 * summary['success']:.1f} % right at {summary['calls_per_question']:.1f} calls per question"
    lead = "" if deploy == IDENTITY else f", {_points(minus(deploy, IDENTITY))} over the original question"
    return {"deploy": deploy, "sentence": f"Deploy {names[deploy]}: {rate}{lead}{others}{warnings}."}


def _chosen(safe: Summaries, minus: Minus) -> str:
    """Return the simplest method that no more complex one clearly beats."""
    deploy = IDENTITY
    for name in (PLAN, POLICY):
        if name not in safe:
            continue
        low, high = minus(name, deploy)["success_ci"]
        fewer = safe[name]["calls_per_question"] <= FEWER_CALLS * safe[deploy]["calls_per_question"]
        if low > 0 or (high >= 0 and fewer and minus(name, IDENTITY)["success_ci"][0] > 0):
            deploy = name
    return deploy


def _others(deploy: str, safe: Summaries, summaries: Summaries, minus: Minus, names: Mapping[str, str]) -> str:
    """Return what the sentence says of the rest of identity, plan and policy, and of the best of the other rows."""
    rest = [name for name in safe if name not in (deploy, IDENTITY)]
    words = [_against(names[name], minus(name, deploy), safe[name]) for name in rest]
    rows = [name for name, summary in summaries.items() if name not in _NAMES and summary["scored"]]
    best = max(rows, key=lambda name: float(summaries[name]["success"]), default=IDENTITY)
    if deploy != IDENTITY != best and minus(best, deploy)["success_ci"][1] >= 0:
        words.append(_against(best, minus(best, deploy), summaries[best], tie="is not clearly worse"))
    return "".join(f"; {word}" for word in words)


def _against(name: str, difference: Mapping[str, Any], summary: Mapping[str, Any], *, tie: str = "") -> str:
    low, high = difference["success_ci"]
    how = tie or ("is not better" if difference["success"] <= 0 else "is not clearly better")
    how = "is better" if low > 0 else "is worse" if high < 0 else how
    return f"{name} {how} ({_points(difference)}, {summary['calls_per_question']:.1f} calls)"


def _points(difference: Mapping[str, Any]) -> str:
    low, high = difference["success_ci"]
    return f"{100 * difference['success']:+.1f} points [{100 * low:+.1f}, {100 * high:+.1f}]"


def warning_of(num_questions: int, *, of: str = "", below: int = FEW_QUESTIONS) -> Sequence[str]:
    """Return the line that says which differences mean nothing with fewer questions than `below`, or none."""
    of = of or f"held-out question{'s' * (num_questions > 1)}"
    if not 0 < num_questions < below:
        return ()
    points = min(100, round(100 * _Z95 * math.sqrt(DISCORDANT / num_questions)))
    return (f"{num_questions} {of}: differences under {points} points mean nothing.",)
