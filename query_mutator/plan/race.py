"""Fill a table within a number of calls: plans race on ever more training questions.

single actions   the original question and every action alone, with at most `SINGLES` of the calls
compositions     every edit of the best plan that was not edited yet, those of the most promising actions first:
                 insert, delete and swap operators, insert and delete ask points, add a second answer
race             eight questions or more, then twice as many, at last all; each stage takes at most half of the
                 calls left, the best plans first. Plans surely worse than the best on the same questions leave
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from query_mutator.cli.console import progress
from query_mutator.confidence import ConfidenceModel
from query_mutator.confidence.gain import GainModel
from query_mutator.env.task import Task, operator_names
from query_mutator.errors import TooFewAnswersError
from query_mutator.learners.plan import Plan
from query_mutator.plan.choose import FRONT, PlanChoice, PlanPoint, cross_fitted, learn_arms, point_of
from query_mutator.plan.table import Table
from query_mutator.session.play import Caller
from query_mutator.stats.intervals import Floats
from query_mutator.types import ASK, AnswerRule

Rows = tuple[int, ...]  # indices of questions

MIN_CALLS, MAX_CALLS = 20, 20_000
CALLS_PER_QUESTION = 15  # at least; fewer calls score fewer questions
FIRST_QUESTIONS = 8  # of a race, doubled while actions alone take at most a share of the calls
FIRST_SHARE = 0.125
SINGLES = 0.6  # share of the calls for actions alone
SURE = 1.65  # standard errors behind the best: 95 %, one-sided
EDITED = 6  # best plans to edit, and the best one at each budget
SEARCHED_SHARE = 2 / 3  # of the calls, where P(right) is learned: the rest asks in all forms

RULES: tuple[AnswerRule, ...] = ("vote", "best")


def find_plan(
    caller: Caller,
    task: Task,
    *,
    max_calls: int,
    seed: int = 0,
    budget: float | None = None,
    learned: bool = False,
    on_best: Callable[[PlanPoint], Any] = lambda point: None,
) -> PlanChoice:
    """Return the plans found on the questions of a task (training questions) with at most `max_calls` calls.

    `budget` bounds the mean calls per question of the plan to choose. Few calls score fewer questions, a random sample.
    With `learned` a third of them asks in all forms, for plans that submit the answer that is most likely right; where
    that does not suffice the result says why it has none.
    `caller` is an `Evaluator`. `on_best` is called with each plan that is the best one so far, on the questions scored
    so far.
    """
    count = questions_searched(len(task.questions), max_calls, learned=learned)
    order = np.random.default_rng(seed).permutation(len(task.questions))[:count].tolist()
    with progress("plan search", max_calls) as bar:
        table = Table(caller, task, on_call=bar.update)
        max_searched = int(SEARCHED_SHARE * max_calls) if learned else max_calls
        race = Race(table, order, max_calls=max_searched, budget=budget, on_best=on_best)
        race.run()
        if not learned:
            return race.result()
        race.max_calls = max_calls
        try:
            model, gains, order, points = _ask_in_all_forms(race, seed=seed)
        except TooFewAnswersError as error:
            return race.result(not_learned=str(error))
        fitted = [point for point in points if point.fitted]
        return race.result(fitted, confidence=model, gains=gains, order=order)


def questions_searched(num_questions: int, max_calls: int, *, learned: bool = False) -> int:
    """Return how many of the questions a search scores."""
    calls = int(SEARCHED_SHARE * max_calls) if learned else max_calls
    return min(num_questions, max(1, calls // CALLS_PER_QUESTION))


def _ask_in_all_forms(
    race: Race, *, seed: int
) -> tuple[ConfidenceModel, GainModel | None, tuple[str, ...], list[PlanPoint]]:
    """Ask the questions of a race in all forms, as far as its calls go.

    TooFewAnswersError for a task with fewer than two forms, and for too few answers to learn from.
    """
    table, rows = race.table, race.compared_rows
    forms = [form.name for form in table.task.forms]
    if len(forms) < 2:
        raise TooFewAnswersError(
            "--answer learned chooses among answers in several forms; name two or more with --forms"
        )
    plans = {form: Plan(steps=(form,)) for form in forms}
    race.score(plans.values(), rows)
    asked = {form: plan for form, plan in plans.items() if plan in race.tried[rows]}
    graded = table.graded(rows, asked.values())
    has_models = any(form.model for form in table.task.forms)
    prices = {form: max(1e-9, race.point(plan, rows).calls) for form, plan in asked.items()} if has_models else {}
    model, gains, order, points = learn_arms(
        graded, budget=race.budget, price=race.price, compared=[*asked], prices=prices, seed=seed
    )
    model.report.check()
    if not any(point.fitted for point in points):
        raise TooFewAnswersError("the calls of the search do not suffice for --answer learned; give it more --minutes")
    return model, gains, order, points


def edits_of(plan: Plan, task: Task, *, has_no_effect: Callable[[str], bool]) -> Iterator[Plan]:
    """Yield the plans of a task that differ by one edit; a first early answer comes with each submit rule.

    `has_no_effect` returns whether an action leaves every original question as it is.
    """
    forms, rules = {form.name for form in task.forms}, (plan.answer,) if plan.asks_early else RULES
    for edited in _edits(plan.steps, operator_names(task.actions), has_no_effect):
        # A form asks; an ask that repeats another one or the last is left out.
        steps = [each for name in edited for each in ((name, ASK) if name in forms else (name,))]
        kept = [name for name, after in itertools.pairwise((*steps, ASK)) if not name == after == ASK]
        if task.rules.max_asks == 1:
            kept = [name for name in kept if name != ASK]
        for rule in rules:
            found = Plan(steps=tuple(kept))
            yield replace(found, answer=rule) if found.asks_early else found


def _edits(steps: Sequence[str], names: Sequence[str], has_no_effect: Callable[[str], bool]) -> Iterator[Sequence[str]]:
    """Yield steps with one inserted, deleted or swapped, or with one more action for a second answer."""
    count = len(steps)
    for name in names:
        if name not in steps:  # some work on an answer only
            for new in ((name,), (ASK, name)) if has_no_effect(name) else ((name,),):
                yield from ((*steps[:at], *new, *steps[at:]) for at in range(count + 1))
            yield *steps, ASK, name
    yield from ((*steps[:at], *steps[at + 1 :]) for at in range(count))
    for one, other in itertools.combinations(range(count), 2):
        swapped = list(steps)
        swapped[one], swapped[other] = steps[other], steps[one]
        yield swapped
    yield from ((*steps[:at], ASK, *steps[at:]) for at in range(count))


class Race:
    """Scores plans on ever more of the questions `order`, at each stage those of the stage before and as many again.

    `best` is the best plan on the most questions on which plans were compared; `on_best` is called whenever it
    changes. `budget` bounds the mean calls per question of the plan to choose.
    """

    def __init__(
        self,
        table: Table,
        order: Sequence[int],
        *,
        max_calls: int,
        budget: float | None,
        on_best: Callable[[PlanPoint], Any],
    ) -> None:
        self.table, self.max_calls, self.budget, self._on_best = table, max_calls, budget, on_best
        self.names = operator_names(table.task.actions)
        first = FIRST_SHARE * max_calls / (2 * len(self.names) or 1)
        doubled = (FIRST_QUESTIONS * 2**stage for stage in itertools.count())
        sizes = [*itertools.takewhile(len(order).__gt__, doubled), len(order)]
        small = sum(size <= first for size in sizes[1:])
        self.stages: list[Rows] = [tuple(order[:size]) for size in sizes[small:]]
        self.tried: dict[Rows, dict[Plan, None]] = {rows: {} for rows in self.stages}
        self.best: PlanPoint | None = None
        self.price = float(np.mean(table.task.rules.call_price))
        self._points: dict[tuple[Plan, int], PlanPoint] = {}
        self._started = time.perf_counter()

    def run(self) -> None:
        """Race single actions, then edits of the best plans, until calls or ideas run out."""
        table = self.table
        singles = [Plan(steps=(name,)) for name in self.names]
        by_cost = sorted(singles, key=lambda one: table.max_calls(one, self.stages[0]))
        self._race(by_cost, self.budget, int(SINGLES * self.max_calls))
        edited: set[Plan] = set()
        while (job := self._next(edited)) is not None and table.calls < self.max_calls:
            plan, budget = job
            edited.add(plan)
            leads = {name: self._lead(name, budget) for name in self.names}
            plans = dict.fromkeys(edits_of(plan, table.task, has_no_effect=self._has_no_effect))
            by_promise = sorted(plans, key=lambda one: sum(leads[name] for name in one.operators), reverse=True)
            self._race(by_promise, budget, self.max_calls)

    def result(self, learned: Sequence[PlanPoint] = (), **more: Any) -> PlanChoice:
        """Return what was found, on all questions, or the most on which the calls let plans be compared."""
        rows = self.compared_rows
        plans = list(dict.fromkeys([Plan(), *self.tried[rows]]))
        return PlanChoice(
            points=[*(self.point(plan, rows) for plan in plans), *learned],
            bar=self.point(Plan(), rows),
            price=self.price,
            budget=self.budget,
            searched=cross_fitted(self.table, plans, rows, price=self.price, budget=self.budget),
            plans_tried=len(self.tried[self.stages[0]]),
            calls=self.table.calls,
            seconds=time.perf_counter() - self._started,
            **more,
        )

    @property
    def compared_rows(self) -> Rows:
        """Return the most questions on which plans were compared."""
        return max(filter(self.tried.get, self.stages), key=lambda rows: (len(self.tried[rows]) > 1, len(rows)))

    def score(self, plans: Iterable[Plan], rows: Rows, max_calls: int | None = None) -> None:
        """Score plans in their order while the search is sure to stay within `max_calls`, by default those it has."""
        waiting = [plan for plan in plans if plan not in self.tried[rows]]
        while waiting:
            left = (self.max_calls if max_calls is None else max_calls) - self.table.calls
            totals = itertools.accumulate(self.table.max_calls(plan, rows) for plan in waiting)
            fitting = sum(1 for _ in itertools.takewhile(left.__ge__, totals))
            if not fitting:
                return
            now, waiting = waiting[:fitting], waiting[fitting:]
            self.table.gather(now, rows)
            self.tried[rows] |= dict.fromkeys(now)
            compared = self.compared_rows
            tried = self.tried[compared]
            groups = self.ranked(tried, compared, self.budget) or self.ranked(tried, compared)
            if (leader := self.point(groups[0][0], compared)) != self.best:
                self.best = leader
                self._on_best(leader)

    def ranked(self, plans: Iterable[Plan], rows: Rows, budget: float | None = None) -> list[list[Plan]]:
        """Return plans by value, the best first; with a budget by success, those above it left out.

        Plans of equal figures form a group, the shortest first: so far they differ in no question.
        """
        groups: dict[tuple[float, ...], list[Plan]] = {}
        for plan in sorted(plans, key=lambda plan: len(plan.steps)):
            point = self.point(plan, rows)
            if budget is None:
                groups.setdefault((point.value(self.price), point.success), []).append(plan)
            elif point.calls <= budget:
                groups.setdefault((point.success, point.score, -point.calls), []).append(plan)
        return [groups[figures] for figures in sorted(groups, reverse=True)]

    def point(self, plan: Plan, rows: Rows) -> PlanPoint:
        """Return a plan's figures on the questions of a stage."""
        key = (plan, len(rows))
        if key not in self._points:
            self._points[key] = point_of(self.table, plan, rows)
        return self._points[key]

    def _gains(self, plan: Plan, rows: Rows, budget: float | None) -> Floats:
        """Return what a plan is ranked by for each question [n]; NaN for an unscored question."""
        cells = self.table.cells(plan, rows)
        return np.array([one.score - self.price * one.calls if budget is None else one.success for one in cells])

    def _has_no_effect(self, name: str) -> bool:
        rows, plan = self.stages[0], Plan(steps=(name,))
        return plan in self.tried[rows] and self.point(plan, rows) == replace(self.point(Plan(), rows), plan=plan)

    def _next(self, edited: set[Plan]) -> tuple[Plan, float | None] | None:
        """Return the best plan that was not edited yet, and the budget within which its edits compete.

        The best plans are edited first, then the best one at each budget.
        """
        rows = self.stages[-1]
        best = [(group[0], self.budget) for group in self.ranked(self.tried[rows], rows, self.budget)[:EDITED]]
        within = ((budget, self.ranked(self.tried[rows], rows, budget)[:1]) for budget in FRONT)
        at_budgets = [(group[0], budget) for budget, groups in within for group in groups]
        return next((job for job in (*best, *at_budgets) if job[0] not in edited), None)

    def _race(self, plans: Iterable[Plan], budget: float | None, max_calls: int) -> None:
        """Score plans on ever more questions, the most promising first, within a number of calls of the search."""
        table, whole = self.table, self.stages[-1]
        entered = list(dict.fromkeys([Plan(), *plans]))
        for rows in self.stages:
            unfinished = filter(None, (table.max_calls(plan, whole) for plan in entered))
            left = max_calls - table.calls - sum(itertools.islice(unfinished, 2))
            self.score(entered, rows, max_calls if rows == whole else table.calls + left // 2)
            entered = self._not_surely_worse([plan for plan in entered if plan in self.tried[rows]], rows, budget)

    def _not_surely_worse(self, plans: Sequence[Plan], rows: Rows, budget: float | None) -> list[Plan]:
        """Return the original question and, the best first, the plans that may still be the best."""
        ranked = [plan for group in self.ranked(self.tried[rows], rows, budget) for plan in group]
        entered, best = set(plans), self._gains(ranked[0], rows, budget) if ranked else np.empty(0)

        def may_be_best(plan: Plan) -> bool:
            leads = self._gains(plan, rows, budget) - best
            leads = leads[~np.isnan(leads)]
            count = max(1, len(leads))
            spread = math.sqrt((float(leads.var()) + 1 / count) / count) if len(leads) else math.inf
            return bool(leads.sum() / count + SURE * spread >= 0)

        return list(dict.fromkeys([Plan(), *(plan for plan in ranked if plan in entered and may_be_best(plan))]))

    def _lead(self, name: str, budget: float | None) -> float:
        """Return the mean lead of an action alone over the original question, where most questions were asked."""
        single = Plan(steps=(name,))
        rows = next((rows for rows in reversed(self.stages) if single in self.tried[rows]), ())
        leads = self._gains(single, rows, budget) - self._gains(Plan(), rows, budget)
        return float(np.nansum(leads)) / max(1, len(leads))
