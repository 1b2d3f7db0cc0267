"""Questions asked in one form after the other: what is submitted after each answer, and which rules say when to stop.

n questions, k forms in the order in which they are asked
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from query_mutator.confidence import Stopping, StoppingRule, places_by_question, rule_for_budget, submissions
from query_mutator.confidence.table import TrainingTable
from query_mutator.evaluation.plan_result import PlanPoint
from query_mutator.learners.plan import Plan
from query_mutator.stats.intervals import wilson_interval
from query_mutator.types import ASK, DoubleArray

__all__ = ["AnswerPaths"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPaths:
    """What would be submitted after each of k answers to n questions, by P(right) that is out of fold."""

    order: tuple[str, ...]  # k forms
    p: list[list[float]]  # [n][k], P(right) of what is submitted
    right: DoubleArray  # [n, k]
    scores: DoubleArray  # [n, k]

    @classmethod
    def of(
        cls, table: TrainingTable, p_alone: DoubleArray, scores: DoubleArray, order: Sequence[str], *, agreement: float
    ) -> Self:
        """Follow the questions of a table that were asked in all forms; `p_alone` and `scores` are of its answers."""
        p, rows = [], []
        for places in places_by_question(table, order):
            found = submissions(p_alone[places], table.answer_groups[places].tolist(), agreement=agreement)
            p.append([value for _, value in found])
            rows.append([places[chosen] for chosen, _ in found])
        chosen_rows = np.array(rows, dtype=np.int64).reshape(len(rows), len(order))
        return cls(order=tuple(order), p=p, right=table.right[chosen_rows], scores=scores[chosen_rows])

    def rules(self, budgets: Iterable[float], *, price: float, prefix_calls: float = 0.0) -> list[StoppingRule]:
        """Return the rules for budgets of calls per question that can be kept, then that for the price of a call.

        `prefix_calls` are those before the first answer.
        """
        within = [self.rule_within(one - prefix_calls) for one in budgets]
        return list(dict.fromkeys([*(rule for rule in within if rule is not None), self.rule_worth(price)]))

    def rule_within(self, budget: float) -> StoppingRule | None:
        """Return the rule for a budget of calls per question, None for one that cannot be kept."""
        budget, most = budget - 1 / len(self.p), len(self.order)
        return rule_for_budget(self.p, budget, max_calls=most) if 1 <= budget <= most else None

    def rule_worth(self, price: float) -> StoppingRule:
        """Return the rule for the price of a call."""
        return Stopping.fit(self.p).rule_for_price(price, max_calls=len(self.order))

    def stops(self, threshold: float) -> list[int]:
        """Return after which answer of each question P(right) is that high, else the last: [n] numbers from 0."""
        return [next((at for at, p in enumerate(path) if p >= threshold), len(path) - 1) for path in self.p]

    def point(self, rule: StoppingRule, *, prefix: Sequence[str] = (), prefix_calls: float = 0.0) -> PlanPoint:
        """Return the plan of a stopping rule after the operators `prefix`, with its figures."""
        steps = [*prefix, *(step for form in self.order[: rule.max_calls] for step in (form, ASK))][:-1]
        stop = math.floor(1e4 * rule.threshold) / 1e4 if rule.threshold <= 1 else None  # down: within the budget
        stops = self.stops(math.inf if stop is None else stop)
        questions = np.arange(len(stops))
        right = int(self.right[questions, stops].sum())
        return PlanPoint(
            plan=Plan(steps=tuple(steps), answer="learned", stop_fit=stop),
            success=right / len(stops),
            success_ci=wilson_interval(right, len(stops)),
            score=float(self.scores[questions, stops].mean()),
            calls=float(np.mean(stops)) + 1 + prefix_calls,
            questions=len(stops),
        )
