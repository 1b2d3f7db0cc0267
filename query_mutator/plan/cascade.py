"""Cascades: several models as arms, each asked where that is predicted to gain most for its price.

    n questions, K arms of different prices

`Cascades` walks from a first arm to the one with the largest predicted gain per price, and so on. Where a question
stops is decided by one threshold; first arm and threshold are chosen by a budget or the price of a unit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from query_mutator.confidence.crossfit import TrainingTable
from query_mutator.confidence.features import FEATURES, LOGPROB
from query_mutator.confidence.submission import submitted, vote
from query_mutator.learners.plan import Plan
from query_mutator.stats.paired import difference_interval
from query_mutator.types import ASK, BoolArray, DoubleArray, IntArray

_THRESHOLDS = np.linspace(0, 1, 65)  # quantiles of the gains per price, to choose a threshold from
_LOGPROB, _HAS_KEY = FEATURES.index(LOGPROB), FEATURES.index("has_key")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """Rates of right submissions by rules that are chosen on other folds than they are scored on."""

    calls: float  # per question, that were made
    success: float  # by P(right)
    vote: float  # of a plain vote with as many calls; 1.5 calls are a second answer for a random half
    single: float  # the best arm alone, at one call
    lead: float  # of P(right) over the vote, of a cascade over one at random
    lead_ci: tuple[float, float]
    random: float | None = None  # of a cascade that asks the same arms for as many questions at random
    by_logprob: float | None = None  # of one that asks for those whose first reply has a low mean log probability


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """How questions are answered from a first arm on: after each of K answers, in an order that differs by question."""

    asked: IntArray  # [n, K] arms
    gains: DoubleArray  # [n, K], per price, of the next arm; -inf after the last
    prices: DoubleArray  # [n, K] so far
    right: DoubleArray  # [n, K], of what would be submitted

    def stops(self, least: float) -> IntArray:
        """Return after which answer no next arm gains as much per price: [n] numbers from 0."""
        return np.asarray(np.argmax(self.gains < least, axis=1))

    def part(self, rows: BoolArray | slice) -> Walk:
        """Return some of the questions."""
        return Walk(asked=self.asked[rows], gains=self.gains[rows], prices=self.prices[rows], right=self.right[rows])

    def at(self, stops: IntArray) -> tuple[DoubleArray, DoubleArray]:
        """Return whether what is submitted is right, and what was paid [n]."""
        rows = np.arange(len(stops))
        return self.right[rows, stops], self.prices[rows, stops]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The first arm, and the least gain per price for which another one is asked."""

    first: int
    least: float


@dataclass(frozen=True, kw_only=True)
class Cascades:
    """The answers of K arms to n questions: `rows` [n, K] of a table, with out-of-fold P(right) and gains."""

    table: TrainingTable
    p: DoubleArray  # of the rows of the table
    agreement: float
    arms: Sequence[str]
    rows: IntArray  # [n, K]
    gains: DoubleArray  # [n, K, K]
    prices: DoubleArray  # [K]

    @cached_property
    def right(self) -> DoubleArray:
        """Return whether each arm's answer is right [n, K]."""
        return self.table.right[self.rows]

    @cached_property
    def walks(self) -> list[Walk]:
        """Return the walk from each arm."""
        return [self._walk(first) for first in range(len(self.arms))]

    def _walk(self, first: int) -> Walk:
        n, count = self.rows.shape
        asked = np.full((n, count), first)
        gains, right = np.full((n, count), -math.inf), np.empty((n, count))
        for at in range(n):
            left, order, held = [*range(count)], list[int](), first
            following = first
            for place in range(count):
                order.append(following)
                left.remove(following)
                held = self.submitted(at, order)
                right[at, place] = self.right[at, held]
                if left:
                    values = self.gains[at, held, left] / self.prices[left]
                    following, gains[at, place] = left[int(values.argmax())], values.max()
            asked[at] = order
        return Walk(asked=asked, gains=gains, prices=np.cumsum(self.prices[asked], axis=1), right=right)

    def submitted(self, at: int, order: Sequence[int]) -> int:
        """Return the arm whose answer to a question is submitted of those that were asked."""
        rows = self.rows[at, order]
        return order[submitted(self.p[rows], self.table.answer_groups[rows].tolist(), agreement=self.agreement)]

    def rule(self, rows: BoolArray | slice, *, budget: float | None, price: float) -> Rule | None:
        """Return the best rule on some questions, within a mean price or by the price of a unit; None for none within.

        Of equal ones it is the cheapest.
        """
        best, found = (-math.inf, -math.inf), None
        for first, walk in enumerate(self.walks):
            part = walk.part(rows)
            values = part.gains[np.isfinite(part.gains)]
            for least in (math.inf, *(np.unique(np.quantile(values, _THRESHOLDS)) if len(values) else ())):
                right, paid = part.at(part.stops(float(least)))
                if budget is not None and paid.mean() > budget:
                    continue
                value = float(right.mean() - (price * paid.mean() if budget is None else 0.0))
                if (value, -float(paid.mean())) > best:
                    best, found = (value, -float(paid.mean())), Rule(first=first, least=float(least))
        return found

    def plan(self, rule: Rule) -> Plan:
        """Return the plan of a rule; its first arm alone where no other is ever asked."""
        if math.isinf(rule.least):
            return Plan(steps=(self.arms[rule.first],))
        others = [arm for place, arm in enumerate(self.arms) if place != rule.first]
        steps = [step for arm in (self.arms[rule.first], *others) for step in (arm, ASK)][:-1]
        return Plan(steps=tuple(steps), answer="learned", gain_at=rule.least)

    def shares(self, rule: Rule) -> dict[str, float]:
        """Return the share of calls to each arm, the first one first."""
        walk = self.walks[rule.first]
        made = np.arange(len(self.arms)) <= walk.stops(rule.least)[:, None]
        counts = np.bincount(walk.asked[made], minlength=len(self.arms))
        order = sorted(range(len(self.arms)), key=lambda place: place != rule.first)
        return {self.arms[place]: float(counts[place] / counts.sum()) for place in order}

    # --- baselines at the same price ---------------------------------------------------------------------------------

    def random(self, walk: Walk, stops: IntArray) -> DoubleArray:
        """Return how likely the answer is right [n] where the same arms are asked for as many questions at random."""
        found = np.zeros(len(self.rows))
        sets, counts = np.unique(self._asked(walk, stops), axis=0, return_counts=True)
        for asked, count in zip(sets, counts, strict=True):
            order = [int(walk.asked[0, 0]), *(at for at in np.flatnonzero(asked).tolist() if at != walk.asked[0, 0])]
            kept = [self.submitted(at, order) for at in range(len(self.rows))]
            found += count / len(stops) * self.right[np.arange(len(self.rows)), kept]
        return found

    def by_logprob(self, walk: Walk, stops: IntArray) -> DoubleArray | None:
        """Return whether the answer is right [n] where as many calls go to the first replies of low log probability.

        None where no log probabilities are known.
        """
        first = int(walk.asked[0, 0])
        logprob = self.table.columns[self.rows[:, first], _LOGPROB]
        if np.isnan(logprob).any():
            return None
        ranks = np.argsort(np.argsort(logprob, kind="stable"), kind="stable")
        return walk.at(np.sort(stops)[::-1][ranks])[0]

    def voted(self, first: int, paid: float) -> DoubleArray:
        """Return how likely a vote of all arms is right [n], at random for as many questions as the price allows."""
        share = min(1.0, (paid - self.prices[first]) / max(1e-12, self.prices.sum() - self.prices[first]))
        chosen = []
        for rows in self.rows:
            counted = self.table.columns[rows, _HAS_KEY]
            chosen.append(rows[vote(self.table.answer_groups[rows].tolist(), counted if counted.any() else None)])
        return np.asarray(share * self.table.right[chosen] + (1 - share) * self.right[:, first])

    def _asked(self, walk: Walk, stops: IntArray) -> BoolArray:
        """Return which arms were asked [n, K]."""
        asked = np.zeros(self.rows.shape, dtype=bool)
        for place in range(len(self.arms)):
            made = stops >= place
            asked[np.flatnonzero(made), walk.asked[made, place]] = True
        return asked


def cross_fitted_cascade(
    cascades: Cascades, folds: IntArray, targets: Sequence[str], *, budget: float | None, price: float
) -> Fitted:
    """Return what rules bring that are chosen on the other folds, and the baselines at the price that they paid."""
    right, paid, random, voted, single = (np.zeros(len(folds)) for _ in range(5))
    logprob: DoubleArray | None = np.zeros(len(folds))
    cheapest = Rule(first=int(cascades.prices.argmin()), least=math.inf)
    for fold in np.unique(folds):
        inside = folds == fold
        rule = cascades.rule(~inside, budget=budget, price=price) or cheapest
        walk = cascades.walks[rule.first]
        stops = walk.stops(rule.least)
        right[inside], paid[inside] = (values[inside] for values in walk.at(stops))
        random[inside] = cascades.random(walk, stops)[inside]
        voted[inside] = cascades.voted(rule.first, float(paid[inside].mean()))[inside]
        known = cascades.by_logprob(walk, stops)
        logprob = None if known is None or logprob is None else np.where(inside, known, logprob)
        single[inside] = cascades.right[inside, int(cascades.right[~inside].mean(axis=0).argmax())]
    return Fitted(
        calls=float(paid.mean()),
        success=float(right.mean()),
        vote=float(voted.mean()),
        single=float(single.mean()),
        lead=float((right - random).mean()),
        lead_ci=difference_interval(right - random, targets),
        random=float(random.mean()),
        by_logprob=None if logprob is None else float(logprob.mean()),
    )
