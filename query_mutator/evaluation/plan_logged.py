"""Learn P(right), the order of prompts and when to stop from graded answers of a log, without a call.

    answers of a log -> P(right), out of fold -> the order of prompts -> at which P(right) to stop, by budget or price

The figures of plans are out of fold. In the table by calls the order and the threshold of each fold are chosen on the
other folds too; so are the prompts that vote, and the best one alone.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from query_mutator.confidence import (
    ConfidenceModel,
    LoggedAnswer,
    greedy_order,
    places_by_question,
    rule_for_budget,
    training_table,
    vote,
)
from query_mutator.confidence.features import FEATURES
from query_mutator.confidence.scorers import SCORERS, Candidate
from query_mutator.confidence.table import TrainingTable
from query_mutator.data.split import FOLDS
from query_mutator.errors import TooFewAnswersError
from query_mutator.evaluation.answer_paths import AnswerPaths
from query_mutator.evaluation.plan_learned import BUDGETS, MOST_ANSWERS
from query_mutator.evaluation.plan_result import PlanPoint
from query_mutator.learners.plan import Plan
from query_mutator.stats.intervals import wilson_interval
from query_mutator.stats.paired import difference_interval
from query_mutator.types import AS_IS, BoolArray, DoubleArray

__all__ = ["CallsRow", "LoggedPlans", "logged_plans"]

CALLS = (1.0, 1.5, 2.0, 3.0, 6.0)  # per question, of the table
LEAST_QUESTIONS = 50  # in a log, and with an answer to each prompt of a plan
LEAST_SHARE = 0.5  # of the questions of the most frequent prompt
MOST_PROMPTS, MOST_ORDERED = 16, 2_000  # prompts, the best, and questions, to choose an order from
_HAS_KEY = FEATURES.index("has_key")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallsRow:
    """Rates of right submissions at a number of calls per question, cross-fitted by target."""

    calls: float
    learned: float  # by P(right)
    learned_calls: float  # that it made
    vote: float  # plain; 1.5 calls are a second answer for a random half
    single: float  # the best prompt alone, at one call
    lead: float  # of learned over vote
    lead_ci: tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedPlans:
    """What a log teaches; the points are plans of prompts, which need not be known as forms."""

    confidence: ConfidenceModel
    order: tuple[str, ...]  # of prompts, as a plan asks them
    points: tuple[PlanPoint, ...]
    chosen: PlanPoint
    by_calls: tuple[CallsRow, ...]
    questions: int  # that were asked in every prompt that was compared
    rates: Mapping[str, float]  # of right answers, by prompt that was compared
    not_compared: Mapping[str, int]  # prompt -> answers, where too few questions have one

    @property
    def verdict(self) -> str:
        """Return one sentence on what to use."""
        chosen = self.chosen
        rate = f"{100 * chosen.success:.1f} % of {chosen.questions:,} logged questions right"
        if chosen.plan.answer != "learned":
            more = "no plan of several prompts pays for its calls" if self.by_calls else "too few have two answers"
            return f"Ask {chosen.plan} alone: {rate}; {more}."
        row = min(self.by_calls, key=lambda row: abs(row.calls - chosen.calls))
        low, high = (100 * bound for bound in row.lead_ci)
        lead = f"{100 * row.lead:+.1f} points [{low:+.1f}, {high:+.1f}]"
        fitted = f"{100 * _at(self.by_calls, chosen.calls):.1f} % cross-fitted"
        return (
            f"Use the plan {chosen.plan}: {rate} at {chosen.calls:.1f} calls per question, {fitted}; "
            f"at {row.calls:g} calls {lead} against a plain vote; the best prompt alone {100 * row.single:.1f} %."
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain types, without a text of the log."""
        front = {
            f"{budget:g}": _chosen(self.points, self.by_calls, budget=budget, price=0.0) for budget in (1, *BUDGETS)
        }
        singles = {point.plan: point.to_json() for point in self.points if not point.plan.asks_early}
        original = singles.get(Plan(steps=(AS_IS,)))
        return {
            "best": self.chosen.to_json(),
            "single": max(singles.values(), key=lambda point: point["success"]),
            **({} if original is None else {"original": original}),
            "verdict": self.verdict,
            "front": {budget: point.to_json() for budget, point in front.items()},
            "by_calls": [asdict(row) for row in self.by_calls],
            "order": list(self.order),
            "rates": dict(self.rates),
            "not_compared": dict(self.not_compared),
            "p_right": self.confidence.describe(),
            "calls": 0,
        }


def logged_plans(
    answers: Sequence[LoggedAnswer],
    *,
    budget: float | None,
    price: float,
    candidates: Sequence[Candidate] = SCORERS,
    seed: int = 0,
) -> LoggedPlans:
    """Return what graded answers teach; TooFewAnswersError for too few of them.

    `budget` bounds the mean calls per question of the plan to choose; without it that of the most right answers minus
    `price` for each call is chosen.
    """
    count = len({answer.question for answer in answers})
    if count < LEAST_QUESTIONS:
        raise TooFewAnswersError(
            f"{len(answers)} graded answers to {count} questions are too few to learn from; log answers to "
            f"{LEAST_QUESTIONS} questions or more"
        )
    table = _asked_apart(training_table(answers))
    model = ConfidenceModel.fit(table, candidates=candidates, seed=seed)
    counts = dict(Counter(table.forms).most_common())
    prompts = _shared_prompts(table, counts)
    log = _Log.whole(table, model, prompts)
    if len(prompts) > 1:
        paths, by_calls = log.paths(order := log.order()), _by_calls(log)
        points = [log.alone(name) for name in prompts]
        points += [paths.point(rule) for rule in paths.rules([*BUDGETS, budget or 0.0], price=price)]
    else:  # each question was asked in one prompt: compare their rates
        prompts, by_calls = [name for name, n in counts.items() if n >= LEAST_QUESTIONS] or prompts, ()
        points = [_Log.whole(table, model, [name]).alone(name) for name in prompts]
        order = [max(points, key=lambda point: point.success).plan.steps[0]]
    return LoggedPlans(
        confidence=model,
        order=tuple(order),
        points=tuple(points),
        chosen=_chosen(points, by_calls, budget=budget, price=price),
        by_calls=by_calls,
        questions=len(log.places),
        rates={point.plan.steps[0]: point.success for point in points if not point.plan.asks_early},
        not_compared={name: n for name, n in counts.items() if name not in prompts},
    )


def _chosen(
    points: Sequence[PlanPoint], by_calls: Sequence[CallsRow], *, budget: float | None, price: float
) -> PlanPoint:
    """Return the best plan within a budget, else by the price of calls; those of several prompts as cross-fitted."""

    def value(point: PlanPoint) -> tuple[float, float]:
        rate = point.success if point.plan.answer != "learned" else _at(by_calls, point.calls)
        return (rate - price * point.calls if budget is None else rate), -point.calls

    return max((point for point in points if point.calls <= (budget or math.inf)), key=value)


def _at(by_calls: Sequence[CallsRow], calls: float) -> float:
    """Return the cross-fitted rate of learned submissions at a mean number of calls, between the rows of the table."""
    return float(np.interp(calls, [row.calls for row in by_calls], [row.learned for row in by_calls]))


def _asked_apart(table: TrainingTable) -> TrainingTable:
    """Return a table in which the second answer to a question in a form is one to another asking of the question."""
    seen: Counter[tuple[int, str]] = Counter()
    askings = []
    for question, form in zip(table.questions.tolist(), table.forms, strict=True):
        askings.append((question, seen[question, form]))
        seen[question, form] += 1
    return replace(table, questions=np.unique(askings, axis=0, return_inverse=True)[1].reshape(-1))


def _shared_prompts(table: TrainingTable, counts: Mapping[str, int]) -> list[str]:
    """Return the prompts that enough of the same questions were asked in, the most frequent first."""
    first, *others = counts
    least = max(LEAST_QUESTIONS, LEAST_SHARE * counts[first])
    shared = [first]
    for name in (name for name in others if counts[name] >= least):
        if len(places_by_question(table, [*shared, name])) >= least:
            shared.append(name)
    return shared


@dataclass(frozen=True, slots=True, kw_only=True)
class _Log:
    """Answers to questions that were asked in all of some prompts, with P(right) [n] out of fold."""

    table: TrainingTable
    p: DoubleArray
    prompts: Sequence[str]
    agreement: float
    places: list[list[int]]  # the rows of each question, in the order of the prompts
    rates: Mapping[str, float]

    @classmethod
    def whole(cls, table: TrainingTable, model: ConfidenceModel, prompts: Sequence[str]) -> _Log:
        """Return the answers to questions that were asked in all prompts, question by question."""
        rows = np.array(sorted(itertools.chain(*places_by_question(table, prompts))), dtype=np.int64)
        rows = rows[np.argsort(table.questions[rows], kind="stable")]
        return cls.of(table.part(rows), model.out_of_fold[rows], prompts, agreement=model.agreement)

    @classmethod
    def of(cls, table: TrainingTable, p: DoubleArray, prompts: Sequence[str], *, agreement: float) -> _Log:
        names = np.array(table.forms)
        rates = {name: float(table.right[names == name].mean()) for name in prompts}
        places = places_by_question(table, prompts)
        return cls(table=table, p=p, prompts=prompts, agreement=agreement, places=places, rates=rates)

    def part(self, chosen: BoolArray) -> _Log:
        """Return some of the answers, all those to a question together."""
        rows = np.flatnonzero(chosen)
        return _Log.of(self.table.part(rows), self.p[rows], self.prompts, agreement=self.agreement)

    def by_rate(self) -> list[str]:
        """Return the prompts, that with the most right answers first."""
        return sorted(self.prompts, key=lambda name: -self.rates[name])

    def order(self) -> list[str]:
        """Return the prompts in the order in which a plan asks them."""
        ranked, every = self.by_rate()[:MOST_PROMPTS], -(-len(self.places) // MOST_ORDERED)
        rows = np.array(sorted(itertools.chain(*self.places[::every])), dtype=np.int64)
        table, p = self.table.part(rows), self.p[rows]
        return greedy_order(table, p, ranked, first=ranked[0], agreement=self.agreement, most=MOST_ANSWERS)

    def paths(self, order: Sequence[str]) -> AnswerPaths:
        return AnswerPaths.of(self.table, self.p, self.table.right, order, agreement=self.agreement)

    def alone(self, prompt: str) -> PlanPoint:
        """Return the plan that asks in one prompt."""
        n, rate = len(self.places), self.rates[prompt]
        interval = wilson_interval(round(rate * n), n)
        return PlanPoint(
            plan=Plan(steps=(prompt,)), success=rate, success_ci=interval, score=rate, calls=1.0, questions=n
        )

    def right_alone(self, prompt: str) -> DoubleArray:
        """Return whether the answers in a prompt are right [n]."""
        return self.table.right[[rows[self.prompts.index(prompt)] for rows in self.places]]

    def right_by_vote(self, prompts: Sequence[str]) -> DoubleArray:
        """Return whether the most frequent of the answers in some prompts is right [n]; a reply may have none."""
        at = [self.prompts.index(name) for name in prompts]
        right = []
        for rows in self.places:
            asked = [rows[place] for place in at]
            counted = self.table.columns[asked, _HAS_KEY]
            chosen = vote(self.table.answer_groups[asked].tolist(), counted if counted.any() else None)
            right.append(self.table.right[asked[chosen]])
        return np.array(right)


def _by_calls(log: _Log) -> tuple[CallsRow, ...]:
    """Return the table by calls, as far as there are prompts."""
    budgets = [calls for calls in CALLS if calls <= min(len(log.prompts), MOST_ANSWERS)]
    fold = log.table.fold_of(FOLDS)
    parts = [_outcomes(log.part(fold != part), log.part(fold == part), budgets) for part in np.unique(fold)]
    found = np.concatenate([outcomes for outcomes, _ in parts], axis=1)  # [4, n, budgets]
    targets = [target for _, names in parts for target in names]
    learned, calls, votes, single = found
    return tuple(
        CallsRow(
            calls=budget,
            learned=float(learned[:, at].mean()),
            learned_calls=float(calls[:, at].mean()),
            vote=float(votes[:, at].mean()),
            single=float(single[:, at].mean()),
            lead=float((learned - votes)[:, at].mean()),
            lead_ci=difference_interval((learned - votes)[:, at], targets),
        )
        for at, budget in enumerate(budgets)
    )


def _outcomes(others: _Log, log: _Log, budgets: Sequence[float]) -> tuple[DoubleArray, list[str]]:
    """Return by budget what is right and how many calls it took [4, n, budgets], chosen on others, and the targets."""
    order, ranked = others.order(), others.by_rate()
    chosen_on, paths = others.paths(order), log.paths(order)
    votes = [log.right_by_vote(ranked[: calls + 1]) for calls in range(len(order))]
    questions = np.arange(len(log.places))
    columns = []
    for budget in budgets:
        stops = _stops(chosen_on, paths, budget)
        low, high = votes[int(budget) - 1], votes[int(np.ceil(budget)) - 1]
        columns.append(
            [paths.right[questions, stops], 1.0 + np.array(stops), (low + high) / 2, log.right_alone(ranked[0])]
        )
    targets = [str(log.table.targets[rows[0]]) for rows in log.places]
    return np.moveaxis(np.array(columns, dtype=np.float64), 0, 2), targets


def _stops(chosen_on: AnswerPaths, paths: AnswerPaths, budget: float) -> list[int]:
    """Return after which answer each question stops at a budget; the threshold is chosen on other questions."""
    if budget == 1:
        return [0] * len(paths.p)
    threshold = rule_for_budget(chosen_on.p, budget, max_calls=len(paths.order)).threshold
    return paths.stops(threshold)
