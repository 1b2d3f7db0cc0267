"""Read a table: the rates of plans, and what to use.

    cells of plans   -> a `PlanPoint` each; success of the plan that is best on the other folds
    all plans        -> `PlanChoice`: the best plan within a budget, the bar that it must clear, the verdict

`plan/arms.py` has the plans that submit by P(right).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from query_mutator.confidence import ConfidenceModel
from query_mutator.confidence.gain import GainModel
from query_mutator.data import fold_of
from query_mutator.errors import UsageError
from query_mutator.learners import Plan
from query_mutator.plan.table import Rows, Table
from query_mutator.stats import wilson_interval
from query_mutator.types import AS_IS

MIN_QUESTIONS = 20  # fewer decide nothing
FRONT = tuple(range(1, 9))  # calls per question, of the front of a search
BUDGETS = (1.5, 2.0, 3.0, 4.0, 6.0)  # mean calls per question of plans that submit by P(right), to choose from


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """Rates of right submissions by rules that are chosen on other folds than they are scored on."""

    calls: float  # per question, that were made; of arms with prices, what they cost
    success: float  # by P(right)
    vote: float  # of a plain vote with as many calls; 1.5 calls are a second answer for a random half
    single: float  # the best arm alone
    lead: float  # of P(right) over the vote, of gains over asking at random
    lead_ci: tuple[float, float]
    random: float | None = None  # of asking the same arms for as many questions at random, of a plan by gains


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPoint:
    """A plan's figures on the questions that it was scored on; calls are means per question, no-ops free.

    Of arms with prices, `calls` is the mean price per question.
    """

    plan: Plan
    success: float
    success_ci: tuple[float, float]
    score: float
    calls: float
    questions: int
    fitted: Fitted | None = None  # of several arms, by P(right)
    shares: Mapping[str, float] = field(default_factory=dict)  # of the calls to each arm, of a cascade

    @property
    def reliable_success(self) -> float:
        """Return the success, of several arms at most that of rules which were chosen on other folds."""
        return self.success if self.fitted is None else min(self.success, self.fitted.success)

    def value(self, price: float) -> float:
        """Return the mean score minus the price of the calls, less by what the success is too high."""
        return self.score - price * self.calls - (self.success - self.reliable_success)

    def to_json(self) -> dict[str, Any]:
        """Return plain types, with the plan in words."""
        return {**asdict(self), "plan": str(self.plan), "steps": list(self.plan.steps)}


def point_of(table: Table, plan: Plan, rows: Rows) -> PlanPoint:
    """Return the figures of a gathered plan on the questions `rows`; unscored ones are left out."""
    cells = [cell for cell in table.cells(plan, rows) if cell.error is None]
    count, right = len(cells), sum(cell.success >= 0.5 for cell in cells)
    return PlanPoint(
        plan=plan,
        success=right / count if count else 0.0,
        success_ci=wilson_interval(right, count),
        score=float(np.mean([cell.score for cell in cells])) if count else 0.0,
        calls=float(np.mean([cell.calls for cell in cells])) if count else 0.0,
        questions=count,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChoice:
    """What a table says; of equal values the shortest plan is first."""

    points: Sequence[PlanPoint]  # plans that were scored on all its questions, sorted by value
    bar: PlanPoint  # which a plan must clear: the original question, of a log the best prompt alone
    price: float  # of a call
    budget: float | None = None  # mean calls per question, of the plan to choose
    searched: tuple[float, float] = (0.0, 0.0)  # success of plans chosen on other folds, and their lead over the bar
    plans_tried: int = 0
    calls: int = 0  # 0: from a log
    seconds: float = 0.0
    confidence: ConfidenceModel | None = None  # by which plans with the rule `learned` submit
    gains: GainModel | None = None  # by which plans ask where that gains most
    order: tuple[str, ...] = ()  # of arms, as such plans ask them; those of a log need not be known as forms
    not_learned: str = ""  # why there are no such plans, where they were asked for

    def __post_init__(self) -> None:
        ranked = sorted(self.points, key=lambda point: (-round(point.value(self.price), 12), len(point.plan.steps)))
        object.__setattr__(self, "points", tuple(ranked))

    @property
    def chosen(self) -> PlanPoint:
        """Return the best plan, within the budget if there is one.

        A searched plan is the best of many, so its figures are too high by chance: by as much as its success is above
        that of plans chosen on other folds. One of several arms that does as well as what is left is preferred.
        """
        best, learned = self.best_plan_at(self.budget), self.best_learned
        if not self.calls or best.fitted is not None or learned is None:
            return best
        too_high = max(0.0, best.success - self.searched[0])
        ours, others = (
            point.value(self.price) if self.budget is None else point.reliable_success for point in (learned, best)
        )
        return learned if ours - (others - too_high) >= 0 else best

    @property
    def best_learned(self) -> PlanPoint | None:
        """Return the best plan that submits by P(right), within the budget if there is one."""
        points = [point for point in self.points if point.plan.answer == "learned"]
        within = [point for point in points if point.calls <= (self.budget or math.inf)]
        return self.best_plan_at(self.budget, within) if within else None

    @property
    def cross_fitted(self) -> float:
        """Return success on each fold under what is best on the others."""
        return self.searched[0] if self.chosen.fitted is None else self.chosen.reliable_success

    @property
    def saved(self) -> PlanPoint:
        """Return the chosen plan, or the bar where the choice does no better on questions it left out."""
        chosen, lead = self.chosen, self.searched[1]
        if chosen.fitted is not None:
            lead = chosen.value(self.price) - self.bar.value(self.price)
        is_as_right = self.cross_fitted >= self.bar.success or bool(chosen.shares)  # cheaper models may be less often
        return chosen if lead > 0 and is_as_right else self.bar

    @property
    def verdict(self) -> str:
        """Return one sentence on the plan that is saved and the bar."""
        few = " These are too few questions to rely on it." if self.bar.questions < MIN_QUESTIONS else ""
        return f"{self._keep if self.saved == self.bar else self._use}{few}"

    @property
    def _keep(self) -> str:
        bar, chosen = self.bar, self.chosen
        rate = f"{100 * bar.success:.1f} % of {bar.questions:,}"
        if not self.calls and self.confidence is not None:
            why = "P(right) orders right and wrong answers no better than chance"
            if any(point.fitted for point in self.points):
                why = "no plan of several prompts pays for its calls"
            elif self.confidence.report.is_ordered:
                why = "too few questions were asked in two prompts"
            return f"Ask {bar.plan} alone: {rate} logged answers right; {why}."
        best = f"the best plan, {chosen.plan}, has {100 * self.cross_fitted:.1f} % cross-fitted"
        rest = "no plan does better" if chosen == bar else best
        return f"Keep the original question: {rate} training questions right; {rest}."

    @property
    def _use(self) -> str:
        saved, fitted, bar = self.saved, self.saved.fitted, 100 * self.bar.success
        source = "training" if self.calls else "logged"
        unit = "price" if saved.shares else "calls"
        of = f"of {saved.questions:,} {source} questions right at {saved.calls:.1f} {unit} per question"
        start = f"Use the plan {saved.plan}: {100 * saved.success:.1f} % {of}"
        if fitted is None:
            return f"{start}, {100 * self.cross_fitted:.1f} % cross-fitted; the original question {bar:.1f} %."
        low, high = (100 * bound for bound in fitted.lead_ci)
        rival = "a plain vote with as many calls" if fitted.random is None else "as many questions sent on at random"
        lead = f"{100 * fitted.lead:+.1f} points [{low:+.1f}, {high:+.1f}] against {rival}"
        if saved.shares:
            lead += f"; calls: {shares_in_words(saved.shares)}"
        out_of_fold = f"cross-fitted {100 * fitted.success:.1f} % at {fitted.calls:.1f}, {lead}"
        standard = f"original question {bar:.1f}" if self.calls else f"best prompt alone {100 * fitted.single:.1f}"
        return f"{start}; {out_of_fold}; the {standard} %."

    def best_plan_at(self, budget: float | None, of: Sequence[PlanPoint] = ()) -> PlanPoint:
        """Return the plan of the best success within a mean number of calls, without a budget that of the best value.

        `of` are the points to choose from, by default all. UsageError for a budget below all.
        """
        points = of or self.points
        if budget is None:
            return points[0]
        within = [point for point in points if point.calls <= budget]
        if not within:
            least = min(point.calls for point in points)
            raise UsageError(f"budget {budget:g} is below the {least:.2f} calls per question that every plan needs")
        return max(within, key=lambda point: (point.reliable_success, point.score, -point.calls))

    @property
    def front(self) -> dict[float, PlanPoint]:
        """Return the best plan at each budget."""
        least = min(point.calls for point in self.points)
        budgets: Iterable[float] = FRONT if self.calls else (1, *BUDGETS)
        if any(point.shares for point in self.points):
            budgets = sorted({round(point.calls + 5e-4, 3) for point in self.points})
        return {budget: self.best_plan_at(budget) for budget in budgets if budget >= least}

    def to_json(self) -> dict[str, Any]:
        """Return plain types, without a text of the answers."""
        original = next((point for point in self.points if point.plan in (Plan(), Plan(steps=(AS_IS,)))), None)
        found: dict[str, Any] = {
            "best": self.chosen.to_json(),
            **({"original": original.to_json()} if original else {}),
            **({} if self.calls else {"single": self.bar.to_json()}),
            "verdict": self.verdict,
            "front": {f"{budget:g}": point.to_json() for budget, point in self.front.items()},
            "cross_fitted_success": self.cross_fitted,
            "plans_tried": self.plans_tried,
            "calls": self.calls,
            "seconds": round(self.seconds, 3),
            "not_learned": self.not_learned,
        }
        if self.confidence is not None:
            found |= {"p_right": self.confidence.describe(), "order": list(self.order)}
        return found


def cross_fitted(
    table: Table, plans: Sequence[Plan], rows: Rows, *, price: float, budget: float | None
) -> tuple[float, float]:
    """Return success on each fold of the plan that is chosen on the other four, over all questions, and its lead.

    The lead over the original question is in score minus the price of calls; -inf where all questions are one fold.
    Questions that are not scored count for nothing. Of equal plans the first in an order that no result decides is
    taken: else it would be one that does well on the left-out fold.
    """
    plans = sorted(plans, key=lambda plan: (len(plan.steps), str(plan)))
    folds = np.array([fold_of(table.task.questions[row]) for row in rows])
    success, leads = list[float](), list[float]()
    for fold in np.unique(folds):
        inside, others = np.array(rows)[folds == fold].tolist(), np.array(rows)[folds != fold].tolist()
        if not others:
            return 0.0, -math.inf
        points = [point_of(table, plan, others) for plan in plans]
        best = PlanChoice(points=points, bar=points[0], price=price, budget=budget).chosen.plan
        for cell, original in zip(table.cells(best, inside), table.cells(Plan(), inside), strict=True):
            if cell.error is None:
                success.append(cell.success)
            if cell.error is None and original.error is None:
                leads.append(cell.score - original.score - price * (cell.calls - original.calls))
    return sum(success) / max(1, len(success)), sum(leads) / max(1, len(leads))


def shares_in_words(shares: Mapping[str, float]) -> str:
    """Return the shares of calls to arms."""
    return ", ".join(f"{arm} {share:.0%}" for arm, share in shares.items())
