"""Learn P(right), the order of prompts and when to stop from graded answers of a log, without a call.

    answers of a log -> P(right), out of fold -> the order of prompts -> at which P(right) to stop, by budget or price

The figures of plans are out of fold. In the table by calls the order and the threshold of each fold are chosen on the
other folds too; so are the prompts that vote, and the best one alone.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from query_mutator.confidence import (
    ConfidenceModel,
    LoggedAnswer,
    StoppingRule,
    greedy_order,
    places_by_question,
    rule_for_budget,
    training_table,
    vote,
)
from query_mutator.confidence.crossfit import TrainingTable
from query_mutator.confidence.features import FEATURES
from query_mutator.confidence.scorers import SCORERS, Candidate
from query_mutator.data.split import FOLDS
from query_mutator.errors import TooFewAnswersError
from query_mutator.evaluation.plan_learned import BUDGETS, MOST_ANSWERS, AnswerPaths
from query_mutator.evaluation.plan_trials import PlanPoint
from query_mutator.learners.plan import Plan
from query_mutator.stats.intervals import rate_intervals
from query_mutator.stats.paired import difference_interval
from query_mutator.types import AS_IS, BoolArray, DoubleArray

CALLS = (1.0, 1.5, 2.0, 3.0, 6.0)  # per question, of the table
LEAST_QUESTIONS = 50  # in a log, and with an answer to each prompt of a plan
LEAST_SHARE = 0.5  # of the questions of the most frequent prompt
MOST_PROMPTS, MOST_ORDERED = 16, 2_000  # prompts, the best, and questions, to choose an order from
_UNORDERED = "P(right) orders right and wrong answers no better than chance"
_HAS_KEY = FEATURES.index("has_key")

Choose = Callable[[AnswerPaths], StoppingRule | None]  # None: one call


@dataclass(frozen=True, slots=True, kw_only=True)
class CallsRow:
    """Rates of right submissions at a number of calls per question, cross-fitted by target."""

    calls: float  # that were asked for
    learned: float  # by P(right)
    learned_calls: float  # that it made
    vote: float  # of a plain vote with as many calls; 1.5 calls are a second answer for a random half
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
    fitted: Mapping[Plan, CallsRow]  # of the points with several prompts
    questions: int  # that were asked in every prompt that was compared
    rates: Mapping[str, float]  # of right answers, by prompt that was compared
    not_compared: Mapping[str, int]  # prompt -> answers, where too few questions have one

    @property
    def why_alone(self) -> str:
        """Return why to ask in one prompt."""
        if self.by_calls:
            return "no plan of several prompts pays for its calls"
        return "too few questions were asked in two prompts" if self.confidence.report.is_ordered else _UNORDERED

    @property
    def verdict(self) -> str:
        """Return one sentence on what to use."""
        chosen = self.chosen
        asked = "questions" if chosen.plan.asks_early else "answers"
        rate = f"{100 * chosen.success:.1f} % of {chosen.questions:,} logged {asked} right"
        if chosen.plan.answer != "learned":
            return f"Ask {chosen.plan} alone: {rate}; {self.why_alone}."
        row = self.fitted[chosen.plan]
        low, high = (100 * bound for bound in row.lead_ci)
        lead = f"{100 * row.lead:+.1f} points [{low:+.1f}, {high:+.1f}] against a plain vote with as many calls"
        fitted = f"cross-fitted {100 * row.learned:.1f} % at {row.learned_calls:.1f}, {lead}"
        return (
            f"Use the plan {chosen.plan}: {rate} at {chosen.calls:.1f} calls per question; {fitted}; "
            f"the best prompt alone {100 * row.single:.1f} %."
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain types, without a text of the log."""
        front = {f"{budget:g}": _chosen(self.points, self.fitted, budget=budget, price=0.0) for budget in (1, *BUDGETS)}
        singles = {point.plan: point.to_json() for point in self.points if not point.plan.asks_early}
        original = singles.get(Plan(steps=(AS_IS,)))
        return {
            "best": self.chosen.to_json(),
            "single": max(singles.values(), key=lambda point: point["success"]),
            **({} if original is None else {"original": original}),
            "verdict": self.verdict,
            "front": {budget: point.to_json() for budget, point in front.items()},
            "cross_fitted": asdict(self.fitted[self.chosen.plan]) if self.chosen.plan in self.fitted else None,
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
    prompts = _shared_prompts(table, counts) if model.report.is_ordered else []
    by_calls, fitted = tuple[CallsRow, ...](), dict[Plan, CallsRow]()
    if len(prompts) > 1:
        log = _Log.whole(table, model, prompts)
        paths, folds = log.paths(order := log.order()), _folds(log)
        by_calls = tuple(_row(folds, _exactly(calls), calls=calls) for calls in CALLS if calls <= len(order))
        points = [log.alone(name) for name in prompts]
        for choose in _choices(budget, price):
            rule = choose(paths)
            if rule is not None and (point := paths.point(rule)).plan not in fitted:
                points.append(point)
                fitted[point.plan] = _row(folds, choose)
    else:  # no questions were asked in several prompts, or nothing says which answer is right: compare rates
        prompts = [name for name, n in counts.items() if n >= LEAST_QUESTIONS] or list(counts)[:1]
        points = [_Log.whole(table, model, [name]).alone(name) for name in prompts]
        order = [max(points, key=lambda point: point.success).plan.steps[0]]
    return LoggedPlans(
        confidence=model,
        order=tuple(order),
        points=tuple(points),
        chosen=_chosen(points, fitted, budget=budget, price=price),
        by_calls=by_calls,
        fitted=fitted,
        questions=max(point.questions for point in points),
        rates={point.plan.steps[0]: point.success for point in points if not point.plan.asks_early},
        not_compared={name: n for name, n in counts.items() if name not in prompts},
    )


def _exactly(calls: float) -> Choose:
    """Return what chooses the rule for so many calls."""
    return lambda paths: None if calls == 1 else rule_for_budget(paths.p, calls, max_calls=len(paths.order))


def _choices(budget: float | None, price: float) -> list[Choose]:
    """Return what chooses the stopping rule of each plan from questions that were asked."""

    def within(calls: float) -> Choose:
        return lambda paths: paths.rule_within(calls)

    return [*map(within, [*BUDGETS, *([] if budget is None else [budget])]), lambda paths: paths.rule_worth(price)]


def _chosen(
    points: Sequence[PlanPoint], fitted: Mapping[Plan, CallsRow], *, budget: float | None, price: float
) -> PlanPoint:
    """Return the best plan within a budget, else by the price of calls; those of several prompts as cross-fitted."""

    def value(point: PlanPoint) -> tuple[float, float]:
        # The rule of a fold may make more calls than the plan's.
        rate = min(point.success, fitted[point.plan].learned) if point.plan in fitted else point.success
        return (rate - price * point.calls if budget is None else rate), -point.calls

    return max((point for point in points if point.calls <= (budget or math.inf)), key=value)


def _asked_apart(table: TrainingTable) -> TrainingTable:
    """Return a table in which the second answer to a question in a form is one to another asking of the question."""
    seen: Counter[tuple[int, str]] = Counter()
    askings = []
    for question, form in zip(table.questions.tolist(), table.forms, strict=True):
        askings.append((question, seen[question, form]))
        seen[question, form] += 1
    return replace(table, questions=np.unique(askings, axis=0, return_inverse=True)[1].reshape(-1))


def _shared_prompts(table: TrainingTable, counts: Mapping[str, int]) -> list[str]:
    """Return the prompts that enough of the same questions were asked in, the one with the most right answers first."""
    names, least = np.array(table.forms), max(LEAST_QUESTIONS, LEAST_SHARE * max(counts.values()))
    frequent = [name for name, n in counts.items() if n >= least] or list(counts)[:1]
    first, *others = sorted(frequent, key=lambda name: -table.right[names == name].mean())
    shared = [first]
    for name in others:
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

    @property
    def targets(self) -> list[str]:
        """Return what each question is about."""
        return [str(self.table.targets[rows[0]]) for rows in self.places]

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
        right, rate = self.right_alone(prompt), self.rates[prompt]
        (interval,) = rate_intervals(right[:, None], self.targets)
        return PlanPoint(
            plan=Plan(steps=(prompt,)), success=rate, success_ci=interval, score=rate, calls=1.0, questions=len(right)
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


class _Fold(NamedTuple):
    """n questions of a fold, asked in an order that is chosen on the others."""

    others: AnswerPaths
    paths: AnswerPaths
    votes: list[DoubleArray]  # [n] each: whether the vote of 1, 2, ... answers is right
    single: DoubleArray  # [n], whether the best prompt alone is right
    targets: list[str]


def _folds(log: _Log) -> list[_Fold]:
    """Return the folds of a log, each with its order and votes by the others."""
    fold = log.table.fold_of(FOLDS)
    found = []
    for number in np.unique(fold):
        others, part = log.part(fold != number), log.part(fold == number)
        order, ranked = others.order(), others.by_rate()
        found.append(
            _Fold(
                others=others.paths(order),
                paths=part.paths(order),
                votes=[part.right_by_vote(ranked[: calls + 1]) for calls in range(len(order))],
                single=part.right_alone(ranked[0]),
                targets=part.targets,
            )
        )
    return found


def _row(folds: Sequence[_Fold], choose: Choose, *, calls: float | None = None) -> CallsRow:
    """Return what submissions by P(right) bring, by a rule chosen on the other folds, and a vote of as many calls."""
    learned, made = [], []
    for fold in folds:
        rule = choose(fold.others)
        stops = [0] * len(fold.targets) if rule is None else fold.paths.stops(rule.threshold)
        learned.append(fold.paths.right[np.arange(len(stops)), stops])
        made += [1 + stop for stop in stops]
    right, targets = np.concatenate(learned), [target for fold in folds for target in fold.targets]
    mean_calls = float(np.mean(made))
    voted = np.concatenate([_vote_of(fold, mean_calls) for fold in folds])
    return CallsRow(
        calls=mean_calls if calls is None else calls,
        learned=float(right.mean()),
        learned_calls=mean_calls,
        vote=float(voted.mean()),
        single=float(np.concatenate([fold.single for fold in folds]).mean()),
        lead=float((right - voted).mean()),
        lead_ci=difference_interval(right - voted, targets),
    )


def _vote_of(fold: _Fold, calls: float) -> DoubleArray:
    """Return how often a vote is right [n]; between two numbers a random share of the questions gets the larger one."""
    low, high = math.floor(calls), math.ceil(calls)
    share = calls - low
    return np.asarray((1 - share) * fold.votes[low - 1] + share * fold.votes[high - 1])
