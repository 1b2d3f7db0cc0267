"""The outcome of a method on a question, and the report of an evaluation: rates by method and group, front, verdict.

    n questions, M methods

A question whose calls failed for good is unscored: its outcome has an error instead.

The verdict is one sentence for the terminal, the page and summary.json: of identity, plan and policy, from the simplest
on, the next one is chosen where it is clearly better (the interval of the paired difference lies above 0), and the
policy also where it is not clearly worse than the plan and makes clearly fewer calls. None may refuse fewer of the
requests that should be refused than the original questions do.

Intervals resample what questions are about (`target_key`): questions about one object succeed and fail together.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import numpy as np

from query_mutator.data import target_key
from query_mutator.plan.choose import MIN_QUESTIONS, shares_in_words
from query_mutator.session.play import check_failures
from query_mutator.stats import DISCORDANT, Floats, compare_pairs, mean_intervals, rate_intervals
from query_mutator.types import CONTROLS, ErrorInfo, Question

MAX_UNSCORED_ROWS = 20  # of a report; all are counted
DIGITS = 4  # of what explains a score; the score itself and its parts are whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of one method on one question; with an `error` there is none, and the numbers are NaN or 0."""

    question_id: str
    success: float = math.nan
    score: float = math.nan
    refused: bool = False
    calls: int = 0  # to mutator and target; also those that another method's equal call saved
    price: float = 0.0  # of these calls; without prices their number
    tokens: int = 0  # of these calls
    reply_tokens: int = 0  # those of the replies
    seconds: float = 0.0  # that these calls took; 0 for replies of the cache on disk
    steps: tuple[str, ...] = ()  # the actions taken
    rewrites: tuple[str, ...] = ()  # the wording after each step
    guards: tuple[str | None, ...] = ()  # that rejected the rewrite of each step
    asked: tuple[str, ...] = ()  # the wordings that the target was asked
    forms: tuple[str, ...] = ()  # in which it was asked them
    answers: tuple[str, ...] = ()  # to those
    models: tuple[str, ...] = ()  # that gave them, of a task with prices
    logprobs: tuple[float | None, ...] = ()  # mean log probabilities of their tokens
    is_cut: bool = False  # the answer that was submitted ended at the token limit
    parts: tuple[Mapping[str, float], ...] = ()  # of the score of each answer
    scores: tuple[float, ...] = ()  # of the answers
    fits: tuple[float, ...] = ()  # cosines of wordings and answers, if these are embedded
    why: str = ""  # the rule that chose the answer, and its number
    submitted: int | None = None  # place among the answers
    error: ErrorInfo | None = None  # why the question is unscored

    @property
    def answer(self) -> str:
        """Return the answer that was submitted."""
        return "" if self.submitted is None else self.answers[self.submitted]

    @property
    def rejected(self) -> tuple[tuple[str, str], ...]:
        """Return operator and guard of each rewrite that was not used."""
        return tuple((name, guard) for name, guard in zip(self.steps, self.guards, strict=False) if guard is not None)

    @property
    def target_calls(self) -> int:
        """Return the number of questions to the target."""
        return len(self.asked)

    @property
    def is_right(self) -> bool:
        """Return whether the submitted answer is right."""
        return self.success >= 0.5

    def to_row(self, question: Question) -> dict[str, Any]:
        """Return plain JSON types, a row of evaluation.jsonl."""
        row = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}
        return {
            **row,
            **(dict.fromkeys(("success", "score", "refused")) if self.error else {}),
            "question": question.text,
            "accepted": list(question.accept or filter(None, [question.reference])),
            "target": target_key(question),
            "tags": list(question.tags),
            "scores": [round(score, DIGITS) for score in self.scores],
            "fits": [round(fit, DIGITS) for fit in self.fits],
            "seconds": round(self.seconds, 6),
        }


def scored(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Return the outcomes without an error."""
    return [outcome for outcome in outcomes if outcome.error is None]


def mean(outcomes: Sequence[Outcome], name: str, *, default: float = math.nan) -> float:
    """Return the mean of a field over the scored outcomes, `default` when there are none."""
    values = [getattr(outcome, name) for outcome in scored(outcomes)]
    return float(np.mean(values)) if values else default


def check_report(report: Mapping[str, Any], *, max_failure_rate: float) -> None:
    """Raise TooManyFailuresError when too many held-out questions of all methods in a report are unscored."""
    kinds = sum((Counter(method["unscored"]) for method in report["methods"].values()), Counter())
    check_failures(kinds, report["n"] * len(report["methods"]), max_failure_rate=max_failure_rate)


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


def count_rewrites(pairs: Iterable[tuple[Question, Outcome]]) -> dict[str, dict[str, Any]]:
    """Return by operator its `rewrites` that differ from their wording, each once, and those each guard `rejected`."""
    counts: dict[str, Counter[str | None]] = defaultdict(Counter)
    seen = set()
    for question, outcome in pairs:
        before = question.text
        for operator, text, guard in zip(outcome.steps, outcome.rewrites, outcome.guards, strict=False):
            key = question.id, operator, before
            if operator not in CONTROLS and (guard or text != before) and key not in seen:
                seen.add(key)
                counts[operator][guard] += 1
            before = text
    return {
        operator: {
            "rewrites": guards.total(),
            "rejected": {guard: count for guard, count in guards.most_common() if guard is not None},
        }
        for operator, guards in sorted(counts.items())
    }


def rejections_in_words(counts: Mapping[str, Any]) -> str:
    """Return one line on the rate of each operator with a rejection, "" without a rewrite."""
    total = sum(found["rewrites"] for found in counts.values())
    if not total:
        return ""
    rates = [
        f"{name} {sum(found['rejected'].values()) / found['rewrites']:.0%} of {found['rewrites']:,} "
        f"({', '.join(f'{guard} {count}' for guard, count in found['rejected'].items())})"
        for name, found in counts.items()
        if found["rejected"]
    ]
    if not rates:
        return f"rejected rewrites: none of {total:,}"
    return f"rejected rewrites (the wording stays): {'; '.join(rates)}"


# --- the report ------------------------------------------------------------------------------------------------------

IDENTITY, PLAN, POLICY = "identity", "best_plan", "policy"
_NAMES = {IDENTITY: "nothing (ask the original question)", PLAN: "the plan", POLICY: "the policy"}
FEW_QUESTIONS = 100  # below it the smallest difference that means something is said
REFUSES = 0.5  # of the requests that should be refused: a model below it loses one or two by chance
FEWER_CALLS = 0.9  # of the plan's calls: a policy costs more to run and to explain than a plan
_Z95 = 1.96

Summaries = Mapping[str, Mapping[str, Any]]
#: The difference in success of two methods, {"success": ..., "success_ci": (low, high)}.
Minus = Callable[[str, str], Mapping[str, Any]]

EXAMPLES = 3  # of answers, where none is right


def recommend(summaries: Summaries, minus: Minus, *, is_plan: bool = False) -> dict[str, Any]:
    """Return {"deploy": a method or None, "sentence": ...}; `is_plan`: the policy is a plan.

    A method that refuses fewer requests that should be refused is not deployed; where the model itself refuses few of
    them, only if its interval is below the model's rate. The sentence says it either way.
    """
    names = _NAMES | ({POLICY: _NAMES[PLAN]} if is_plan else {})
    found = {name: summaries[name] for name in _NAMES if name in summaries and summaries[name]["scored"]}
    if IDENTITY not in found:
        return {"deploy": None, "sentence": "No verdict: the original questions have no scored answers."}
    original = found[IDENTITY]["guard_refusal"]
    fewer = {name: summary for name, summary in found.items() if summary["guard_refusal"] < original}
    unsafe = [
        name for name, summary in fewer.items() if original >= REFUSES or summary["guard_refusal_ci"][1] < original
    ]
    warnings = "".join(
        f"; {names[name]} answers requests that should be refused ({100 * summary['guard_refusal']:.0f} % of them "
        f"refused, the original question {100 * original:.0f} %)"
        for name, summary in fewer.items()
    )
    asked = min(summary["scored"] for summary in found.values())
    if asked < MIN_QUESTIONS:
        few = f"{asked} question{'s are' if asked > 1 else ' is'} too few, give {MIN_QUESTIONS} or more"
        return {"deploy": None, "sentence": f"No verdict: {few}{warnings}."}
    safe = {name: summary for name, summary in found.items() if name not in unsafe}
    deploy = _chosen(safe, minus)
    others = _others(deploy, safe, summaries, minus, names)
    summary = safe[deploy]
    rate = f"{100 * summary['success']:.1f} % right at {cost_in_words(summary)} per question"
    if shares := summary.get("model_shares"):
        rate += f" (calls: {shares_in_words(shares)})"
    lead = "" if deploy == IDENTITY else f", {_points(minus(deploy, IDENTITY))} over the original question"
    return {"deploy": deploy, "sentence": f"Deploy {names[deploy]}: {rate}{lead}{others}{warnings}."}


def _chosen(safe: Summaries, minus: Minus) -> str:
    """Return the simplest method that no more complex one clearly beats."""
    deploy = IDENTITY
    for name in (PLAN, POLICY):
        if name not in safe:
            continue
        low, high = minus(name, deploy)["success_ci"]
        fewer = cost_of(safe[name]) <= FEWER_CALLS * cost_of(safe[deploy])
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
    return f"{name} {how} ({_points(difference)}, {cost_in_words(summary)})"


def cost_of(summary: Mapping[str, Any]) -> float:
    """Return what a method's calls cost per question; without prices their number."""
    return float(summary.get("price_per_question", summary["calls_per_question"]))


def cost_in_words(summary: Mapping[str, Any]) -> str:
    """Return the cost with its unit."""
    cost = cost_of(summary)
    return f"a price of {cost:.3g}" if "price_per_question" in summary else f"{cost:.1f} calls"


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
    tagged = {tag: [tag in question.tags for question in results.questions] for tag in tags}

    @cache
    def minus(ours: str, theirs: str) -> dict[str, Any]:
        found = compare_pairs(right[:, methods.index(ours)], right[:, methods.index(theirs)], keys)
        return {"success": found.difference, "success_ci": list(found.interval), "questions": found.questions}

    baselines = [name for name in methods if name != POLICY] if POLICY in methods else []
    return {
        "n": len(results.questions),
        "methods": summaries,
        "policy_minus": {name: minus(POLICY, name) for name in baselines},
        "by_group": _by_group({**(groups or {}), **tagged}, right, methods, keys),
        "front": front(summaries),
        "verdict": recommend(summaries, minus, is_plan=is_plan),
        "examples": [] if np.nansum(right) else _examples(results),
        "rewrites": count_rewrites(
            pair for found in results.outcomes.values() for pair in zip(results.questions, found, strict=True)
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
    guard_keys = [target_key(question) for question in results.guard]
    measures = {
        "success": (right, rate_intervals(right, keys)),
        "score": (score, np.clip(mean_intervals(score, keys), 0.0, 1.0).tolist()),
        "false_refusal": (refused, rate_intervals(refused, keys)),
        "guard_refusal": (of_guard, rate_intervals(of_guard, guard_keys)),
    }
    summaries = {}
    for place, (name, outcomes) in enumerate(results.outcomes.items()):
        summaries[name] = {
            "scored": len(scored(outcomes)),
            "unscored": failure_kinds(outcomes),
            "guard_unscored": failure_kinds(results.guarded[name]),
            **{measure: _mean(columns[:, place]) for measure, (columns, _) in measures.items()},
            **{f"{measure}_ci": list(intervals[place]) for measure, (_, intervals) in measures.items()},
            **{f"{cost}_per_question": mean(outcomes, cost) for cost in ("calls", "target_calls", "tokens")},
        }
        if asked := Counter(model for one in scored(outcomes) for model in one.models):
            shares = {model: count / asked.total() for model, count in asked.most_common()}
            summaries[name] |= {"price_per_question": mean(outcomes, "price"), "model_shares": shares}
    return summaries


def _mean(values: Floats) -> float:
    return math.nan if np.isnan(values).all() else float(np.nanmean(values))


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
    """Return success against calls, or their price, cheapest first; `on_front`: no method is better for as few."""
    points = [
        {"method": name, "calls": cost_of(summary), "success": summary["success"]}
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
