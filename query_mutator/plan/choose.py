"""Read a table: the rates of plans, the order of arms and when to stop by P(right), what to use.

    cells of plans       -> a `PlanPoint` each; success of the plan that is best on the other folds
    answers in k arms    -> P(right), out of fold -> their order -> the P(right) at which to stop, by budget or price
    both                 -> `PlanChoice`: the best plan within a budget, the bar that it must clear, the verdict

An arm is a form of the request, or a prompt of a log. The model that scores an answer has seen no answer about its
target; in `Fitted` the order of arms and the threshold of each fold are chosen on the other folds too, and so are the
arms that vote and the best one alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Self

import numpy as np

from query_mutator.confidence import (
    ConfidenceModel,
    LoggedAnswer,
    StoppingRule,
    greedy_order,
    places_by_question,
    rule_for_budget,
    rule_for_price,
    submissions,
    training_table,
    vote,
)
from query_mutator.confidence.crossfit import TrainingTable
from query_mutator.confidence.features import FEATURES
from query_mutator.confidence.gain import MOST_ARMS, GainModel, gain_inputs
from query_mutator.data.split import FOLDS, fold_of
from query_mutator.errors import TooFewAnswersError, UsageError
from query_mutator.learners.plan import Plan
from query_mutator.plan.cascade import Cascades, Fitted, cross_fitted_cascade
from query_mutator.plan.table import Rows, Table
from query_mutator.stats.intervals import rate_intervals, wilson_interval
from query_mutator.stats.paired import difference_interval
from query_mutator.types import AS_IS, ASK, DoubleArray, IntArray

MIN_QUESTIONS = 20  # fewer decide nothing
FRONT = tuple(range(1, 9))  # calls per question, of the front of a search
MOST_ANSWERS = 6  # to a question, of a plan that submits by P(right)
BUDGETS = (1.5, 2.0, 3.0, 4.0, 6.0)  # mean calls per question of such plans, to choose from
CASCADE_SHARES = (0.1, 0.2, 0.4, 0.6, 0.8)  # of the highest price, that a cascade may pay besides the lowest
LEAST_QUESTIONS = 50  # in a log, and with an answer to each prompt of a plan
LEAST_SHARE = 0.5  # of the questions of the most frequent prompt
MOST_PROMPTS, MOST_ORDERED = 16, 2_000  # prompts, the best, and questions, to choose an order from
_HAS_KEY = FEATURES.index("has_key")


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


def choose_from_log(
    answers: Sequence[LoggedAnswer],
    *,
    budget: float | None,
    price: float,
    seed: int,
    prices: Mapping[str, float] = MappingProxyType({}),
) -> PlanChoice:
    """Return what graded answers of a log say; TooFewAnswersError for too few of them.

    `budget` bounds the mean calls per question of the plan to choose; without it that of the most right answers minus
    `price` for each call is chosen. With `prices` of a call in each arm both are in their unit.
    """
    graded = [(answer, float(answer.right)) for answer in answers]
    model, gains, order, points = learn_arms(graded, budget=budget, price=price, prices=prices, seed=seed)
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


# --- several arms ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPaths:
    """What would be submitted after each of k answers to n questions, by P(right) that is out of fold."""

    order: tuple[str, ...]  # k arms
    p: DoubleArray  # [n, k], P(right) of what is submitted
    right: DoubleArray  # [n, k]
    scores: DoubleArray  # [n, k]

    def rule(self, budget: float | None, price: float) -> StoppingRule | None:
        """Return the rule for a budget of calls per question, None for one that cannot be kept; else for a price."""
        p, most = self.p.tolist(), len(self.order)
        if budget is None:
            return rule_for_price(p, price, max_calls=most)
        budget = budget - 1 / len(p)
        return rule_for_budget(p, budget, max_calls=most) if 1 <= budget <= most else None

    def stops(self, threshold: float) -> IntArray:
        """Return after which answer of each question P(right) is that high, else the last: [n] numbers from 0."""
        reached = self.p >= threshold
        reached[:, -1] = True
        return np.asarray(np.argmax(reached, axis=1))

    def point(self, rule: StoppingRule) -> PlanPoint:
        """Return the plan of a stopping rule, with its figures."""
        steps = [step for arm in self.order[: rule.max_calls] for step in (arm, ASK)][:-1]
        stop = math.floor(1e4 * rule.threshold) / 1e4 if rule.threshold <= 1 else None  # down: within the budget
        stops = self.stops(math.inf if stop is None else stop)
        questions = np.arange(len(stops))
        right = int(self.right[questions, stops].sum())
        return PlanPoint(
            plan=Plan(steps=tuple(steps), answer="learned", stop_at=stop),
            success=right / len(stops),
            success_ci=wilson_interval(right, len(stops)),
            score=float(self.scores[questions, stops].mean()),
            calls=float(np.mean(stops)) + 1,
            questions=len(stops),
        )


def learn_arms(
    graded: Iterable[tuple[LoggedAnswer, float]],
    *,
    budget: float | None,
    price: float,
    compared: Sequence[str] = (),
    prices: Mapping[str, float] = MappingProxyType({}),
    seed: int,
) -> tuple[ConfidenceModel, GainModel | None, tuple[str, ...], list[PlanPoint]]:
    """Fit P(right) on graded answers with their scores; return it, the order of arms, and plans of one and of several.

    `compared` are the arms of plans of several, by default those that enough of the same questions were asked in. With
    `prices` of the arms, plans of several are cascades, by the gains that are returned second. TooFewAnswersError for
    too few answers to learn from.
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
    asked = partial(_Arms.asked_in, table, np.array([score for _, score in graded]), model)
    counts = {name: n for name, n in Counter(table.forms).most_common() if questions[name] >= LEAST_QUESTIONS}
    names = list(compared or _shared_prompts(table, counts, together.questions)) if model.report.is_ordered else []
    if prices:
        names = names[:MOST_ARMS]
    arms, several, gains = asked(names), dict[Plan, PlanPoint](), None
    if prices and len(names) > 1 and len(np.unique(arms.folds)) > 1:
        texts = [answer.question for answer, _ in graded]
        gains, cascades = arms.cascades(texts, prices)
        alone = [arms.alone(name, prices[name]) for name in names]
        several = arms.cascade_points(cascades, budget=budget, price=price)
        order = [point.plan.operators[0] for point in sorted(alone, key=lambda point: point.calls)]
    elif len(names) > 1 and len(np.unique(arms.folds)) > 1:
        paths, folds = arms.paths(order := arms.order()), arms.by_fold()
        alone = [arms.alone(name) for name in names]
        for calls in (*BUDGETS, budget or 0.0, None):
            rule = paths.rule(calls, price)
            if rule is not None and (point := paths.point(rule)).plan not in several:
                several[point.plan] = replace(point, fitted=_fitted(folds, calls, price))
    else:  # no questions were asked in several arms, or nothing says which answer is right: compare rates
        alone = [asked([name]).alone(name, prices.get(name, 1.0)) for name in counts]
        order = [point.plan.operators[-1] for point in sorted(alone, key=lambda point: -point.success)[:1]]
    return model, gains, tuple(order), [*alone, *several.values()]


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


@dataclass(frozen=True, kw_only=True)
class _Arms:
    """Answers to n questions in each of k arms: `rows` [n, k] of a table."""

    table: TrainingTable
    scores: DoubleArray  # of all answers of the table
    model: ConfidenceModel
    names: Sequence[str]  # k
    rows: IntArray

    @classmethod
    def asked_in(cls, table: TrainingTable, scores: DoubleArray, model: ConfidenceModel, names: Sequence[str]) -> Self:
        """Return the answers to the questions of a table that were asked in all of some arms, in their order."""
        rows = np.array(places_by_question(table, names), dtype=np.int64).reshape(-1, max(1, len(names)))
        rows = rows[np.argsort(table.questions[rows[:, 0]], kind="stable")]
        return cls(table=table, scores=scores, model=model, names=names, rows=rows)

    @property
    def folds(self) -> IntArray:
        """Return the fold [n] of each question."""
        return self.table.fold_of(FOLDS)[self.rows[:, 0]]

    @property
    def targets(self) -> list[str]:
        """Return what each question is about."""
        return [str(target) for target in self.table.targets[self.rows[:, 0]]]

    def right(self, name: str) -> DoubleArray:
        """Return whether the answers in an arm are right [n]."""
        return self.table.right[self.rows[:, self.names.index(name)]]

    def by_rate(self) -> list[str]:
        """Return the arms, that with the most right answers first."""
        return sorted(self.names, key=lambda name: -self.right(name).mean())

    def order(self) -> list[str]:
        """Return the arms in the order in which a plan asks them."""
        ranked, rows = self.by_rate()[:MOST_PROMPTS], self.rows[:: -(-len(self.rows) // MOST_ORDERED)].reshape(-1)
        table, p = self.table.part(rows), self.model.out_of_fold[rows]
        return greedy_order(table, p, ranked, first=ranked[0], agreement=self.model.agreement, most=MOST_ANSWERS)

    def paths(self, order: Sequence[str]) -> AnswerPaths:
        """Return what would be submitted after each answer in an order of arms."""
        p, chosen = [], []
        for rows in self.rows[:, [self.names.index(name) for name in order]]:
            groups = self.table.answer_groups[rows].tolist()
            found = submissions(self.model.out_of_fold[rows], groups, agreement=self.model.agreement)
            p.append([value for _, value in found])
            chosen.append([rows[at] for at, _ in found])
        places = np.array(chosen, dtype=np.int64).reshape(len(chosen), len(order))
        return AnswerPaths(
            order=tuple(order),
            p=np.array(p, dtype=np.float64).reshape(places.shape),
            right=self.table.right[places],
            scores=self.scores[places],
        )

    def cascades(self, texts: Sequence[str], prices: Mapping[str, float]) -> tuple[GainModel, Cascades]:
        """Return the gains of arms, fitted to the answers to questions with these `texts`, and the cascades by them."""
        asked = [texts[row] for row in self.rows[:, 0]]
        inputs = np.stack([gain_inputs(self.table.columns[rows], asked) for rows in self.rows.T], axis=1)
        paid = np.array([prices[name] for name in self.names])
        gains = GainModel.fit(self.names, inputs, self.table.right[self.rows], self.folds, prices=paid)
        return gains, Cascades(
            table=self.table,
            p=self.model.out_of_fold,
            agreement=self.model.agreement,
            arms=self.names,
            rows=self.rows,
            gains=gains.out_of_fold,
            prices=paid,
        )

    def cascade_points(self, cascades: Cascades, *, budget: float | None, price: float) -> dict[Plan, PlanPoint]:
        """Return the plans of cascades at several mean prices per question, at a budget and by the price of a unit."""
        low, high = float(cascades.prices.min()), float(cascades.prices.max())
        points = dict[Plan, PlanPoint]()
        for paid in (*(low + share * high for share in CASCADE_SHARES), *([budget] if budget else ()), None):
            rule = cascades.rule(slice(None), budget=paid, price=price)
            if rule is None or math.isinf(rule.least) or (plan := cascades.plan(rule)) in points:
                continue
            walk = cascades.walks[rule.first]
            right, spent = walk.at(walk.stops(rule.least))
            fitted = cross_fitted_cascade(cascades, self.folds, self.targets, budget=paid, price=price)
            points[plan] = PlanPoint(
                plan=plan,
                success=float(right.mean()),
                success_ci=wilson_interval(int(right.sum()), len(right)),
                score=float(right.mean()),
                calls=float(spent.mean()),
                questions=len(right),
                fitted=fitted,
                shares=cascades.shares(rule),
            )
        return points

    def alone(self, name: str, price: float = 1.0) -> PlanPoint:
        """Return the plan that asks in one arm."""
        right = self.right(name)
        (interval,) = rate_intervals(right[:, None], self.targets)
        return PlanPoint(
            plan=Plan(steps=(name,)),
            success=float(right.mean()),
            success_ci=interval,
            score=float(self.scores[self.rows[:, self.names.index(name)]].mean()),
            calls=price,
            questions=len(right),
        )

    def vote(self, names: Sequence[str]) -> DoubleArray:
        """Return whether the most frequent of the answers in some arms is right [n]; a reply may have none."""
        chosen = []
        for rows in self.rows[:, [self.names.index(name) for name in names]]:
            counted = self.table.columns[rows, _HAS_KEY]
            chosen.append(rows[vote(self.table.answer_groups[rows].tolist(), counted if counted.any() else None)])
        return self.table.right[chosen]

    def by_fold(self) -> list[tuple[Self, AnswerPaths, AnswerPaths, list[str]]]:
        """Return for each fold its answers, the paths of the others and its own in the best order of the others.

        Last are the arms by the others' rates.
        """
        found = []
        for fold in np.unique(self.folds):
            inside = self.folds == fold
            part, others = (replace(self, rows=self.rows[chosen]) for chosen in (inside, ~inside))
            order = others.order()
            found.append((part, others.paths(order), part.paths(order), others.by_rate()))
        return found


def _fitted(
    folds: Sequence[tuple[_Arms, AnswerPaths, AnswerPaths, list[str]]], budget: float | None, price: float
) -> Fitted:
    """Return what submissions by P(right) bring, by a rule chosen on the other folds, and a vote of as many calls."""
    learned, made = [], []
    for _, others, paths, _ in folds:
        rule = others.rule(budget, price)
        stops = paths.stops(-math.inf if rule is None else rule.threshold)
        learned.append(paths.right[np.arange(len(stops)), stops])
        made.append(1 + stops)
    right, calls = np.concatenate(learned), float(np.concatenate(made).mean())
    low, share = math.floor(calls), calls - math.floor(calls)  # a random share of the questions gets one more vote

    def voted(count: int) -> DoubleArray:
        return np.concatenate([part.vote(ranked[:count]) for part, _, _, ranked in folds])

    leads = right - ((1 - share) * voted(low) + share * voted(math.ceil(calls)))
    return Fitted(
        calls=calls,
        success=float(right.mean()),
        vote=float((right - leads).mean()),
        single=float(np.concatenate([part.right(ranked[0]) for part, _, _, ranked in folds]).mean()),
        lead=float(leads.mean()),
        lead_ci=difference_interval(leads, [target for part, *_ in folds for target in part.targets]),
    )
