"""Plans scored on ever more questions: their figures, their order, and what a search has found so far."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from query_mutator.confidence import ConfidenceModel
from query_mutator.data.split import FOLDS, fold_of
from query_mutator.env.episode import QuestionMemory
from query_mutator.errors import UsageError
from query_mutator.evaluation.plans import PlanScores
from query_mutator.evaluation.summary import MIN_QUESTIONS
from query_mutator.learners.plan import Plan
from query_mutator.stats.intervals import Floats, wilson_interval

BUDGETS = tuple(range(1, 9))  # calls per question, of the front

Rows = tuple[int, ...]  # indices of questions
PIECE_S = 10.0  # of a search with a deadline between two looks at the clock
EXPECTED_S = 30.0  # of calls at the expected speed, with which the one seen is averaged


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPoint:
    """A plan's figures on the questions that it was scored on; calls are means per question, no-ops free."""

    plan: Plan
    success: float
    success_ci: tuple[float, float]
    score: float
    calls: float
    questions: int

    def to_json(self) -> dict[str, Any]:
        """Return plain types, with the plan in words."""
        return {**asdict(self), "plan": str(self.plan), "steps": list(self.plan.steps)}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSearch:
    """What a search found; `points` are the plans that were scored on all its questions, the best value first."""

    points: tuple[PlanPoint, ...]
    budget: float | None  # mean calls per question, of the plan to choose
    cross_fitted: float  # success on each fold of the plan chosen on the other four
    cross_fitted_lead: float  # of these over the original question, in score minus the price of calls
    plans_tried: int
    calls: int
    seconds: float
    rewrites: Mapping[str, Any]  # by operator, with those that a guard rejected (`count_rewrites`)
    memories: Mapping[int, QuestionMemory]  # what was rewritten and answered, by question
    confidence: ConfidenceModel | None = None  # by which plans with the rule `learned` submit
    not_learned: str = ""  # why there are none, where they were asked for

    @property
    def best(self) -> PlanPoint:
        """Return the plan of the largest mean score minus the price of its calls."""
        return self.points[0]

    @property
    def original(self) -> PlanPoint:
        """Return the plan that asks the original question only."""
        return next(point for point in self.points if point.plan == Plan())

    @property
    def chosen(self) -> PlanPoint:
        """Return the best plan, within the budget if there is one."""
        return self.best if self.budget is None else self.best_plan_at(self.budget)

    @property
    def best_learned(self) -> PlanPoint | None:
        """Return the best plan that submits by P(right), within the budget if there is one."""
        points = tuple(point for point in self.points if point.plan.answer == "learned")
        if not any(point.calls <= (self.budget or math.inf) for point in points):
            return None
        return replace(self, points=points).chosen

    @property
    def saved(self) -> PlanPoint:
        """Return the chosen plan, or the original question where the choice does no better on questions it left out."""
        is_better = self.cross_fitted_lead > 0 and self.cross_fitted >= self.original.success
        return self.chosen if is_better else self.original

    @property
    def verdict(self) -> str:
        """Return one sentence on the plan that is saved and the original question."""
        few = self.original.questions < MIN_QUESTIONS
        return f"{self._verdict}{' These are too few questions to rely on it.' if few else ''}"

    @property
    def _verdict(self) -> str:
        original, saved = self.original, self.saved
        of = f"of {original.questions} training questions right"
        fitted, bar = f"{100 * self.cross_fitted:.1f} % cross-fitted", f"{100 * original.success:.1f} %"
        if saved.plan != Plan():
            rate = f"{100 * saved.success:.1f} % {of} at {saved.calls:.1f} calls per question, {fitted}"
            return f"Use the plan {saved.plan}: {rate}; the original question {bar}."
        is_original = self.chosen.plan == Plan()
        rest = "no plan does better" if is_original else f"the best plan, {self.chosen.plan}, has {fitted}"
        return f"Keep the original question: {bar} {of}; {rest}."

    def best_plan_at(self, budget: float) -> PlanPoint:
        """Return the plan of the best success within a mean number of calls; UsageError for a budget below all."""
        within = [point for point in self.points if point.calls <= budget]
        if not within:
            least = min(point.calls for point in self.points)
            raise UsageError(f"budget {budget:g} is below the {least:.2f} calls per question that every plan needs")
        return max(within, key=lambda point: (point.success, point.score, -point.calls))

    @property
    def front(self) -> dict[int, PlanPoint]:
        """Return the best plan at each budget."""
        least = min(point.calls for point in self.points)
        return {budget: self.best_plan_at(budget) for budget in BUDGETS if budget >= least}

    def to_json(self) -> dict[str, Any]:
        """Return plain types."""
        return {
            "best": self.chosen.to_json(),
            "original": self.original.to_json(),
            "verdict": self.verdict,
            "front": {str(budget): point.to_json() for budget, point in self.front.items()},
            "cross_fitted_success": self.cross_fitted,
            "plans_tried": self.plans_tried,
            "calls": self.calls,
            "seconds": round(self.seconds, 3),
            "rewrites": dict(self.rewrites),
            "p_right": None if self.confidence is None else self.confidence.describe(),
            "not_learned": self.not_learned,
        }


class Trials:
    """The plans scored so far on the questions `rows` of each stage, which begin with those of the stage before.

    `best` is the best plan on the most questions on which plans were compared; `on_best` are called whenever it
    changes. `budget` bounds the mean calls per question of the plan to choose. With `seconds` plans are scored piece by
    piece, and `max_calls` is bounded by what fits into the time left at the speed seen so far.
    """

    def __init__(
        self,
        scores: PlanScores,
        rows: Sequence[Rows],
        *,
        max_calls: int,
        seconds: float | None = None,
        budget: float | None = None,
        on_best: Iterable[Callable[[PlanPoint], object]] = (),
    ) -> None:
        self.scores, self.rows, self.budget = scores, rows, budget
        self._max_calls, self._seconds, self._started = max_calls, seconds, time.perf_counter()
        self.tried: dict[Rows, dict[Plan, None]] = {each: {} for each in rows}
        self.best: PlanPoint | None = None
        self._compared = 0  # questions
        self.price = float(np.mean(scores.task.rules.call_price))
        self._on_best = tuple(on_best)
        self._points: dict[tuple[Plan, int], PlanPoint] = {}

    def extend(self, max_calls: int, seconds: float | None) -> None:
        """Allow more calls or time."""
        self._max_calls, self._seconds = max_calls, seconds

    @property
    def compared_rows(self) -> Rows:
        """Return the most questions on which plans were compared."""
        return max(filter(self.tried.get, self.rows), key=lambda rows: (len(self.tried[rows]) > 1, len(rows)))

    @property
    def max_calls(self) -> int:
        """Return how many calls the search may have made at its end, as far as is known now."""
        if self._seconds is None:
            return self._max_calls
        left = max(0.0, self._seconds - (time.perf_counter() - self._started))
        return min(self._max_calls, self.scores.calls + int(left * self._calls_per_s))

    @property
    def _calls_per_s(self) -> float:
        """Return the speed so far, close to the expected one in the first seconds; there must be a deadline."""
        assert self._seconds is not None
        expected = EXPECTED_S * self._max_calls / max(1.0, self._seconds)
        return (self.scores.calls + expected) / (time.perf_counter() - self._started + EXPECTED_S)

    def score(self, plans: Iterable[Plan], rows: Rows, share: float = 1.0) -> None:
        """Score plans in their order while their calls are sure to fit a share of those of the search."""
        waiting = [plan for plan in plans if plan not in self.tried[rows]]
        while waiting:
            left = int(share * self.max_calls) - self.scores.calls
            totals = itertools.accumulate(self.scores.max_calls(plan, rows) for plan in waiting)
            fitting = list(itertools.takewhile(left.__ge__, totals))
            if self._seconds is not None:
                piece = PIECE_S * min(self._calls_per_s, self._max_calls / max(1.0, self._seconds))
                if self.best is None:  # two plans soon, or one, whatever it takes
                    fitting = fitting[:2] or [0]
                fitting = fitting[: max(1, sum(total <= piece for total in fitting))]
            if not fitting:
                return
            now, waiting = waiting[: len(fitting)], waiting[len(fitting) :]
            self.scores.gather(now, rows)
            self.tried[rows] |= dict.fromkeys(now)
            self._note_best(now, rows)

    def _note_best(self, plans: Iterable[Plan], rows: Rows) -> None:
        if len(rows) < self._compared:
            return
        is_first = len(rows) > self._compared
        leader = max((self.point(plan, rows) for plan in (self.tried[rows] if is_first else plans)), key=self._rank)
        if len(self.tried[rows]) > 1:  # the original question alone is not compared with anything
            self._compared = len(rows)
        if is_first or self.best is None or self._rank(leader) > self._rank(self.point(self.best.plan, rows)):
            self.best = leader
            for call in self._on_best:
                call(leader)

    def _rank(self, point: PlanPoint) -> tuple[float, ...]:
        if self.budget is None:
            return (self.value_of(point),)
        return (point.calls <= self.budget, point.success, point.score, -point.calls)

    def ranked(self, plans: Iterable[Plan], rows: Rows, budget: float | None = None) -> list[list[Plan]]:
        """Return plans by value, the best first; with a budget by success, those above it left out.

        Plans of equal figures form a group, the shortest first: so far they differ in no question.
        """
        groups: dict[tuple[float, ...], list[Plan]] = {}
        for plan in sorted(plans, key=lambda plan: len(plan.steps)):
            point = self.point(plan, rows)
            if budget is None:
                groups.setdefault((self.value_of(point), point.success), []).append(plan)
            elif point.calls <= budget:
                groups.setdefault((point.success, point.score, -point.calls), []).append(plan)
        return [groups[figures] for figures in sorted(groups, reverse=True)]

    def value_of(self, point: PlanPoint) -> float:
        """Return the mean score minus the price of the calls."""
        return point.score - self.price * point.calls

    def gains(self, plan: Plan, rows: Rows) -> Floats:
        """Return what a plan is ranked by for each question [n]; NaN for an unscored question."""
        price = self.price if self.budget is None else 0.0
        results = self.scores.results(plan, rows)
        gained = [(one.score if self.budget is None else one.success) - price * one.calls for one in results]
        return np.where([one.error is None for one in results], gained, math.nan)

    def point(self, plan: Plan, rows: Rows) -> PlanPoint:
        """Return a plan's figures on `rows`."""
        key = (plan, len(rows))  # of the stages, each of which begins with the one before
        if key not in self._points:
            self._points[key] = self._point(plan, rows)
        return self._points[key]

    def _point(self, plan: Plan, rows: Rows) -> PlanPoint:
        results = [result for result in self.scores.results(plan, rows) if result.error is None]
        count = len(results)
        right = sum(result.success >= 0.5 for result in results)
        return PlanPoint(
            plan=plan,
            success=right / count if count else 0.0,
            success_ci=wilson_interval(right, count),
            score=_mean([result.score for result in results]),
            calls=_mean([result.calls for result in results]),
            questions=count,
        )

    def has_no_effect(self, name: str) -> bool:
        """Return whether an action leaves every original question of the first stage as it is."""
        rows, plan = self.rows[0], Plan(steps=(name,))
        return plan in self.tried[rows] and self.point(plan, rows) == replace(self.point(Plan(), rows), plan=plan)

    def result(self, *, seconds: float) -> PlanSearch:
        """Return what was found, on all questions, or the most on which the calls or the time let plans be compared."""
        rows = self.compared_rows
        found = (self.point(plan, rows) for plan in dict.fromkeys([Plan(), *self.tried[rows]]))
        points = sorted(found, key=lambda point: len(point.plan.steps))
        points.sort(key=self.value_of, reverse=True)
        # In an order that no result decides: the first of equal plans would be one that does well on the left-out fold.
        plans = sorted((point.plan for point in points), key=lambda plan: (len(plan.steps), str(plan)))
        cross_fitted, lead = self._cross_fitted(plans, rows)
        return PlanSearch(
            points=tuple(points),
            budget=self.budget,
            cross_fitted=cross_fitted,
            cross_fitted_lead=lead,
            plans_tried=len(self.tried[self.rows[0]]),
            calls=self.scores.calls,
            seconds=seconds,
            rewrites=self.scores.rewrites,
            memories=self.scores.memories,
        )

    def _cross_fitted(self, plans: Sequence[Plan], rows: Rows) -> tuple[float, float]:
        """Return success on each fold of the plan that is best on the other four, over all questions, and its lead.

        The lead over the original question is in score minus the price of calls; -inf where all questions are one fold.
        Questions that are not scored count for nothing.
        """
        folds = np.array([fold_of(self.scores.task.questions[row]) for row in rows])
        results = [self.scores.results(plan, rows) for plan in plans]
        right, scores, calls = (
            np.array(  # [P, Q]
                [[getattr(one, name) if one.error is None else math.nan for one in row] for row in results], np.float64
            )
            for name in ("success", "score", "calls")
        )
        values = scores - self.price * calls
        chosen = np.full(len(rows), -1)
        for fold in range(FOLDS):
            inside = folds == fold
            if inside.any() and not inside.all():
                of_others = (_means(each[:, ~inside]) for each in (values, right, scores, calls))
                chosen[inside] = _choice(*of_others, budget=self.budget)
        if (chosen < 0).any():
            return 0.0, -math.inf
        columns = np.arange(len(rows))
        leads = values[chosen, columns] - values[plans.index(Plan())]
        success, lead = _means(np.stack([right[chosen, columns], leads]))
        return float(success), float(lead)


def _means(values: Floats) -> Floats:
    """Return the means [P] of the known numbers [P, n], 0 where none is."""
    known = ~np.isnan(values)
    return np.asarray(np.where(known, values, 0.0).sum(axis=1) / np.maximum(1, known.sum(axis=1)))


def _choice(values: Floats, right: Floats, scores: Floats, calls: Floats, *, budget: float | None) -> int:
    """Return the index of the plan of the largest value; with a budget, of the best success among those within it."""
    if budget is None:
        return int(values.argmax())
    within = np.where(calls <= budget, right, -math.inf)
    return int(np.lexsort((-calls, scores, within))[-1])


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else 0.0
