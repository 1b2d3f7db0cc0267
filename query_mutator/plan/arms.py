"""Plans of several arms: in a fixed order while P(right) is low, or on to the arm that gains most for its price.

    n questions, K arms

An arm is a form of the request, a model, or a prompt of a log. Both kinds of plan are walks: the arms of each question
in the order in which they are asked, and after each answer what another one is worth. One threshold of that decides
where a question stops. P(right) and gains of an answer are those of models that have seen no answer about its target;
in `Fitted` order and threshold of each fold are chosen on the other folds too, and so are the arms that vote and the
best one alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Self

import numpy as np

from query_mutator.confidence import (
    ConfidenceModel,
    LoggedAnswer,
    greedy_order,
    places_by_question,
    training_table,
    vote,
)
from query_mutator.confidence.crossfit import TrainingTable
from query_mutator.confidence.features import FEATURES
from query_mutator.confidence.gain import MOST_ARMS, GainModel, gain_inputs
from query_mutator.confidence.submission import MOST_ANSWERS, Walks, submitted
from query_mutator.data import FOLDS
from query_mutator.errors import TooFewAnswersError
from query_mutator.learners import Plan
from query_mutator.plan.choose import BUDGETS, Fitted, PlanChoice, PlanPoint
from query_mutator.stats import difference_interval, rate_intervals, wilson_interval
from query_mutator.types import ASK, BoolArray, DoubleArray, IntArray

PRICE_SHARES = (0.1, 0.2, 0.4, 0.6, 0.8)  # of the highest price, that a plan by gains may pay besides the lowest
LEAST_QUESTIONS = 50  # in a log, and with an answer to each prompt of a plan
LEAST_SHARE = 0.5  # of the questions of the most frequent prompt
MOST_PROMPTS, MOST_ORDERED = 16, 2_000  # prompts, the best, and questions, to choose an order from
_QUANTILES = np.linspace(0, 1, 513)  # of what another answer is worth, to choose a threshold from
_STEP = 1e4  # thresholds of P(right) are multiples of 1 / 10,000
_ALL = -1  # in place of a fold: no question is left out
_HAS_KEY = FEATURES.index("has_key")


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """How questions are answered: after each of k answers, in an order that may differ by question."""

    asked: IntArray  # [n, k] arms
    more: DoubleArray  # [n, k] what another answer is worth: gain per price, or minus eased P(right); -inf at the end
    paid: DoubleArray  # [n, k] so far
    held: IntArray  # [n, k] the answers that would be submitted, rows of the table
    worth: DoubleArray  # [n, k] of those, by which thresholds are chosen

    def stops(self, least: float) -> IntArray:
        """Return after which answer no other one is worth more: [n] numbers from 0."""
        return np.asarray(np.argmax(self.more <= least, axis=1))

    def thresholds(self, *, by_gain: bool) -> list[float]:
        """Return thresholds to choose from: that with which nobody is asked again, and quantiles."""
        values = self.more[np.isfinite(self.more)]
        found = np.unique(np.quantile(values, _QUANTILES)) if len(values) else values
        if by_gain:
            return [math.inf, *found.tolist()]
        return [math.inf, *np.unique(np.ceil(_STEP * found) / _STEP).tolist(), -math.inf]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Arms in order, of a plan by gains only the first one in order, and what another answer must be worth."""

    order: tuple[int, ...]
    least: float


@dataclass(frozen=True, kw_only=True)
class Arms:
    """Answers to n questions in each of K arms: `rows` [n, K] of a table."""

    table: TrainingTable
    scores: DoubleArray  # of all answers of the table
    model: ConfidenceModel
    names: Sequence[str]  # K
    rows: IntArray
    prices: DoubleArray  # [K] of a call
    gains: DoubleArray | None = None  # [n, K, K] of asking the second, given the answer of the first
    _walks: dict[tuple[int, ...], Walk] = field(default_factory=dict, repr=False)

    @classmethod
    def asked_in(
        cls,
        table: TrainingTable,
        scores: DoubleArray,
        model: ConfidenceModel,
        names: Sequence[str],
        prices: Mapping[str, float],
    ) -> Self:
        """Return the answers to the questions of a table that were asked in all of some arms, in their order."""
        rows = np.array(places_by_question(table, names), dtype=np.int64).reshape(-1, max(1, len(names)))
        rows = rows[np.argsort(table.questions[rows[:, 0]], kind="stable")]
        paid = np.array([prices.get(name, 1.0) for name in names])
        return cls(table=table, scores=scores, model=model, names=names, rows=rows, prices=paid)

    @cached_property
    def folds(self) -> IntArray:
        """Return the fold [n] of each question."""
        return self.table.fold_of(FOLDS)[self.rows[:, 0]]

    @property
    def targets(self) -> list[str]:
        """Return what each question is about."""
        return [str(target) for target in self.table.targets[self.rows[:, 0]]]

    @cached_property
    def right(self) -> DoubleArray:
        """Return whether each arm's answer is right [n, K]."""
        return self.table.right[self.rows]

    def ranked(self, among: BoolArray) -> list[int]:
        """Return the arms, that with the most right answers to some questions first."""
        return sorted(range(len(self.names)), key=lambda arm: -self.right[among, arm].mean())

    def fit_gains(self, questions: Sequence[str]) -> GainModel:
        """Return the gains of arms, fitted to the answers to `questions`, a text for each row of the table."""
        asked = [questions[row] for row in self.rows[:, 0]]
        inputs = np.stack([gain_inputs(self.table.columns[rows], asked) for rows in self.rows.T], axis=1)
        return GainModel.fit(self.names, inputs, self.right, self.folds, prices=self.prices)

    # --- who is asked next -------------------------------------------------------------------------------------------

    @cached_property
    def orders(self) -> dict[int, list[tuple[int, ...]]]:
        """Return by fold the orders to choose from, by the answers of the others."""
        return {fold: self._orders(self.folds != fold) for fold in (_ALL, *np.unique(self.folds).tolist())}

    def _orders(self, among: BoolArray) -> list[tuple[int, ...]]:
        ranked, part = self.ranked(among), self.rows[among]
        if self.gains is not None:
            return [(first, *(arm for arm in ranked if arm != first)) for first in range(len(ranked))]
        rows = part[:: -(-len(part) // MOST_ORDERED)].reshape(-1)
        names = [self.names[arm] for arm in ranked[:MOST_PROMPTS]]
        table, p, agreement = self.table.part(rows), self.model.out_of_fold[rows], self.model.agreement
        chosen = greedy_order(table, p, names, first=names[0], agreement=agreement, most=MOST_ANSWERS)
        return [tuple(self.names.index(name) for name in chosen)]

    def walk(self, order: tuple[int, ...]) -> Walk:
        """Return how all questions are answered in an order of arms."""
        if order not in self._walks:
            self._walks[order] = self._walk(order)
        return self._walks[order]

    def _walk(self, order: tuple[int, ...]) -> Walk:
        p, groups, agreement = self.model.out_of_fold, self.table.answer_groups, self.model.agreement
        asked, size = np.tile(order, (len(self.rows), 1)), (len(self.rows), len(order))
        if self.gains is None:
            walks = Walks.of(p, groups, self.rows[:, order].tolist(), agreement=agreement)
            held, worth, more = walks.held, walks.p, -walks.eased
        else:
            held, more = np.empty(size, dtype=np.int64), np.empty(size)
            for at in range(len(self.rows)):
                left, following = [*order], 0
                for place in range(len(order)):
                    asked[at, place] = left.pop(following)
                    rows = self.rows[at, asked[at, : place + 1]]
                    chosen = submitted(p[rows], groups[rows].tolist(), agreement=agreement)
                    held[at, place] = rows[chosen]
                    if left:
                        values = self.gains[at, asked[at, chosen], left] / self.prices[left]
                        following, more[at, place] = int(values.argmax()), values.max()
            worth = self.table.right[held]
        more[:, -1] = -math.inf
        return Walk(asked=asked, more=more, paid=np.cumsum(self.prices[asked], axis=1), held=held, worth=worth)

    def rule(self, left_out: int, *, budget: float | None, price: float) -> Rule | None:
        """Return the best rule on the questions of other folds, within a mean price or by the price of a unit.

        Of equal ones it is the cheapest; None for none within.
        """
        among = np.flatnonzero(self.folds != left_out)
        best, found = (-math.inf, -math.inf), None
        for order in self.orders[left_out]:
            walk = self.walk(order)
            for least in walk.thresholds(by_gain=self.gains is not None):
                stops = walk.stops(least)[among]
                paid, worth = float(walk.paid[among, stops].mean()), float(walk.worth[among, stops].mean())
                value = (worth if budget is not None else worth - price * paid, -paid)
                if value > best and paid <= (budget or math.inf):
                    best, found = value, Rule(order=order, least=least)
        return found

    # --- plans and their figures -------------------------------------------------------------------------------------

    def several(self, *, budget: float | None, price: float) -> list[PlanPoint]:
        """Return the plans of several arms at several mean prices, at a budget and by the price of a unit."""
        low, high = float(self.prices.min()), float(self.prices.max())
        prices = BUDGETS if self.gains is None else [low + share * high for share in PRICE_SHARES]
        points = dict[Plan, PlanPoint]()
        for paid in (*prices, *([budget] if budget else ()), None):
            rule = self.rule(_ALL, budget=paid, price=price)
            if rule is None or rule.least == math.inf or (plan := self.plan(rule)) in points:
                continue
            points[plan] = self._point(plan, rule, self.fitted(budget=paid, price=price))
        return list(points.values())

    def plan(self, rule: Rule) -> Plan:
        """Return the plan of a rule that asks several arms."""
        steps = tuple(step for arm in rule.order for step in (self.names[arm], ASK))[:-1]
        if self.gains is not None:
            return Plan(steps=steps, answer="learned", gain_at=rule.least)
        return Plan(steps=steps, answer="learned", stop_at=None if math.isinf(rule.least) else -rule.least)

    def _point(self, plan: Plan, rule: Rule, fitted: Fitted) -> PlanPoint:
        walk, questions = self.walk(rule.order), np.arange(len(self.rows))
        stops = walk.stops(rule.least)
        held, shares = walk.held[questions, stops], {}
        if self.gains is not None:
            made = walk.asked[np.arange(len(rule.order)) <= stops[:, None]]
            shares = {self.names[arm]: float((made == arm).mean()) for arm in rule.order}
        right = self.table.right[held]
        return PlanPoint(
            plan=plan,
            success=float(right.mean()),
            success_ci=wilson_interval(int(right.sum()), len(right)),
            score=float(self.scores[held].mean()),
            calls=float(walk.paid[questions, stops].mean()),
            questions=len(right),
            fitted=fitted,
            shares=shares,
        )

    def alone(self, name: str) -> PlanPoint:
        """Return the plan that asks in one arm."""
        arm = self.names.index(name)
        right = self.right[:, arm]
        (interval,) = rate_intervals(right[:, None], self.targets)
        return PlanPoint(
            plan=Plan(steps=(name,)),
            success=float(right.mean()),
            success_ci=interval,
            score=float(self.scores[self.rows[:, arm]].mean()),
            calls=float(self.prices[arm]),
            questions=len(right),
        )

    # --- rules of other folds, and baselines at the same price -------------------------------------------------------

    def fitted(self, *, budget: float | None, price: float) -> Fitted:
        """Return what rules bring that are chosen on the other folds, and the baselines at the price that they paid."""
        right, paid, voted, random, single = np.zeros((5, len(self.rows)))
        cheapest, orders = Rule(order=(int(self.prices.argmin()),), least=math.inf), []
        for fold in np.unique(self.folds).tolist():
            inside, ranked = self.folds == fold, self.ranked(self.folds != fold)
            rule = self.rule(fold, budget=budget, price=price) or cheapest
            walk = self.walk(rule.order)
            stops = walk.stops(rule.least)[inside]
            right[inside] = self.table.right[walk.held[inside, stops]]
            paid[inside] = walk.paid[inside, stops]
            single[inside] = self.right[inside, ranked[0]]
            orders.append((inside, ranked, rule.order[0]))
            if self.gains is not None:
                random[inside] = self._random(walk.asked[inside], stops)[inside]
        for inside, ranked, first in orders:
            voted[inside] = self._voted(ranked, first, float(paid.mean()))[inside]
        leads = right - (voted if self.gains is None else random)
        return Fitted(
            calls=float(paid.mean()),
            success=float(right.mean()),
            vote=float(voted.mean()),
            single=float(single.mean()),
            lead=float(leads.mean()),
            lead_ci=difference_interval(leads, self.targets),
            random=None if self.gains is None else float(random.mean()),
        )

    def _voted(self, ranked: Sequence[int], first: int, paid: float) -> DoubleArray:
        """Return how likely a vote of the first arm and the next best ones is right [n], as many as `paid` pays for.

        A random share of the questions gets one more.
        """
        order = sorted(ranked, key=lambda arm: arm != first)
        prices = np.cumsum(self.prices[order])
        count = max(1, int(np.searchsorted(prices, paid, side="right")))
        share = max(0.0, paid - prices[count - 1]) / self.prices[order[count]] if count < len(order) else 0.0
        fewer, more = (self._vote([arm for arm in ranked if arm in order[:most]]) for most in (count, count + 1))
        return fewer + share * (more - fewer)

    def _vote(self, arms: Sequence[int]) -> DoubleArray:
        """Return whether the most frequent of the answers in some arms is right [n]; a reply may have none."""
        chosen = []
        for rows in self.rows[:, arms]:
            counted = self.table.columns[rows, _HAS_KEY]
            chosen.append(rows[vote(self.table.answer_groups[rows].tolist(), counted if counted.any() else None)])
        return self.table.right[chosen]

    def _random(self, asked: IntArray, stops: IntArray) -> DoubleArray:
        """Return how likely the answer is right [n] where the same arms are asked for as many questions at random."""
        found = np.zeros(len(self.rows))
        sets = Counter(
            (int(arms[0]), *sorted(arms[1 : stop + 1].tolist())) for arms, stop in zip(asked, stops, strict=True)
        )
        for arms, count in sets.items():
            rows = self.rows[:, arms]
            p, groups = self.model.out_of_fold[rows], self.table.answer_groups[rows].tolist()
            kept = [submitted(*one, agreement=self.model.agreement) for one in zip(p, groups, strict=True)]
            found += count / len(stops) * self.right[np.arange(len(rows)), np.array(arms)[kept]]
        return found


def learn_arms(
    graded: Iterable[tuple[LoggedAnswer, float]],
    *,
    budget: float | None,
    price: float,
    compared: Sequence[str] = (),
    prices: Mapping[str, float] = MappingProxyType({}),
) -> tuple[ConfidenceModel, GainModel | None, tuple[str, ...], list[PlanPoint]]:
    """Fit P(right) on graded answers with their scores; return it, the order of arms, and plans of one and of several.

    `compared` are the arms of plans of several, by default those that enough of the same questions were asked in. With
    `prices` of the arms, plans of several ask by the gains that are returned second. TooFewAnswersError for too few
    answers to learn from.
    """
    graded = list(graded)
    together = training_table([answer for answer, _ in graded])
    table, forms = _asked_apart(together), np.array(together.forms)
    questions = {name: len(np.unique(together.questions[forms == name])) for name in Counter(together.forms)}
    if (most := max(questions.values())) < LEAST_QUESTIONS:
        raise TooFewAnswersError(
            f"{len(graded)} graded answers to {most} questions in one prompt are too few to learn from; give answers "
            f"to {LEAST_QUESTIONS} questions or more"
        )
    model = ConfidenceModel.fit(table)
    scores = np.array([score for _, score in graded])
    counts = {name: n for name, n in Counter(table.forms).most_common() if questions[name] >= LEAST_QUESTIONS}
    names = list(compared or _shared_prompts(table, counts, together.questions)) if model.report.is_ordered else []
    arms, gains = Arms.asked_in(table, scores, model, names[: MOST_ARMS if prices else None], prices), None
    if len(names) > 1 and len(np.unique(arms.folds)) > 1:
        if prices:
            gains = arms.fit_gains([answer.question for answer, _ in graded])
            arms = replace(arms, gains=gains.out_of_fold)
        alone = [arms.alone(name) for name in arms.names]
        order = arms.orders[_ALL][0] if gains is None else np.argsort(arms.prices, kind="stable").tolist()
        several = arms.several(budget=budget, price=price)
        return model, gains, tuple(arms.names[arm] for arm in order), [*alone, *several]
    # No questions were asked in several arms, or nothing says which answer is right: compare rates.
    alone = [Arms.asked_in(table, scores, model, [name], prices).alone(name) for name in counts]
    best = max(alone, key=lambda point: point.success)
    return model, None, best.plan.operators, alone


def _asked_apart(table: TrainingTable) -> TrainingTable:
    """Return a table in which the second answer to a question in an arm is one to another asking of the question."""
    seen: Counter[tuple[int, str]] = Counter()
    askings = []
    for question, arm in zip(table.questions.tolist(), table.forms, strict=True):
        askings.append((question, seen[question, arm]))
        seen[question, arm] += 1
    return replace(table, questions=np.unique(askings, axis=0, return_inverse=True)[1].reshape(-1))


def _shared_prompts(table: TrainingTable, counts: Mapping[str, int], questions: IntArray) -> list[str]:
    """Return the arms that enough of the same `questions` [n] were asked in, the most right answers first."""
    names, least = np.array(table.forms), LEAST_SHARE * max(counts.values())
    frequent = [name for name, n in counts.items() if n >= least]
    shared = list[str]()
    for name in sorted(frequent, key=lambda name: -table.right[names == name].mean()):
        first = [rows[0] for rows in places_by_question(table, [*shared, name])]
        if len(first) >= least and len(np.unique(questions[first])) >= LEAST_QUESTIONS:
            shared.append(name)
    return shared


def choose_from_log(
    answers: Sequence[LoggedAnswer],
    *,
    budget: float | None,
    price: float,
    prices: Mapping[str, float] = MappingProxyType({}),
) -> PlanChoice:
    """Return what graded answers of a log say; TooFewAnswersError for too few of them.

    `budget` bounds the mean calls per question of the plan to choose; without it that of the most right answers minus
    `price` for each call is chosen. With `prices` of a call in each arm both are in their unit.
    """
    graded = [(answer, float(answer.right)) for answer in answers]
    model, gains, order, points = learn_arms(graded, budget=budget, price=price, prices=prices)
    price = price if budget is None else 0.0
    alone = [point for point in points if not point.fitted]
    affordable = [point for point in alone if point.calls <= (budget or math.inf)] or alone
    return PlanChoice(
        points=points,
        bar=max(affordable, key=lambda point: point.value(price if prices else 0.0)),
        price=price,
        budget=budget,
        plans_tried=len(points),
        confidence=model,
        gains=gains,
        order=order,
    )
