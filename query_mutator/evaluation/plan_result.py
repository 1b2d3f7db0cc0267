"""The result of a search for a plan: plans with their figures, which one is saved, and the sentence that says so."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from query_mutator.confidence import ConfidenceModel
from query_mutator.env.memory import QuestionMemory
from query_mutator.errors import UsageError
from query_mutator.evaluation.verdict import MIN_QUESTIONS
from query_mutator.learners.plan import Plan

__all__ = ["BUDGETS", "PlanPoint", "PlanSearch"]

BUDGETS = tuple(range(1, 9))  # calls per question, of the front


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
