"""Fill a table within a number of calls: plans race on ever more training questions.

single actions   the original question and every action alone, with at most `SINGLES` of the calls
compositions     every edit of the best plan that was not edited yet, those of the most promising actions first:
                 insert, delete and swap operators, insert and delete ask points, add a second answer
race             eight questions or more, then twice as many, at last all, each stage with an equal share of the calls
                 left; the better two thirds of the plans, or the `KEPT` best, enter the next one
"""

from __future__ import annotations

import itertools
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
from query_mutator.learners import Plan
from query_mutator.plan.arms import learn_arms
from query_mutator.plan.choose import FRONT, PlanChoice, PlanPoint, cross_fitted, point_of
from query_mutator.plan.table import Table
from query_mutator.session.play import Caller
from query_mutator.types import ASK, AnswerRule

Rows = tuple[int, ...]  # indices of questions

MIN_CALLS, MAX_CALLS = 20, 20_000
CALLS_PER_QUESTION = 15  # at least; fewer calls score fewer questions
FIRST_QUESTIONS = 8  # of a race, doubled while actions alone take at most a share of the calls
FIRST_SHARE = 0.125
SINGLES = 0.6  # share of the calls for actions alone
KEPT = 4  # best plans that are kept in a race at least
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
    that does not suffice the result says why it has none. With several models and no operators all calls do that.
    `caller` is an `Evaluator`. `on_best` is called with each plan that is the best one so far, on the questions scored
    so far.
    """
    arms = len(task.forms) if learned and not task.operators and any(form.model for form in task.forms) else 0
    count = questions_searched(len(task.questions), max_calls, learned=learned, arms=arms)
    order = np.random.default_rng(seed).permutation(len(task.questions))[:count].tolist()
    with progress("plan search", max_calls) as bar:
        table = Table(caller, task, on_call=bar.update)
        max_searched = int(SEARCHED_SHARE * max_calls) if learned else max_calls
        race = Race(table, order, max_calls=max_searched, budget=budget, on_best=on_best)
        if arms:
            race.score([Plan()], race.stages[-1], max_calls)
        else:
            race.run()
        if not learned:
            return race.result()
        race.max_calls = max_calls
        try:
            model, gains, order, points = _ask_in_all_forms(race)
        except TooFewAnswersError as error:
            return race.result(not_learned=str(error))
        fitted = [point for point in points if point.fitted]
        return race.result(fitted, confidence=model, gains=gains, order=order)


def questions_searched(num_questions: int, max_calls: int, *, learned: bool = False, arms: int = 0) -> int:
    """Return how many of the questions a search scores; with `arms` of several models each is asked in all of them."""
    calls = int(SEARCHED_SHARE * max_calls) if learned and not arms else max_calls
    return min(num_questions, max(1, calls // (arms or CALLS_PER_QUESTION)))


def _ask_in_all_forms(
    race: Race,
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
    race.score(plans.values(), rows, race.max_calls)
    asked = {form: plan for form, plan in plans.items() if plan in race.tried[rows]}
    graded = table.graded(rows, asked.values())
    has_models = any(form.model for form in table.task.forms)
    prices = {form: max(1e-9, race.point(plan, rows).calls) for form, plan in asked.items()} if has_models else {}
    model, gains, order, points = learn_arms(
        graded, budget=race.budget, price=race.price, compared=[*asked], prices=prices
    )
    model.report.check()
    if not any(point.fitted for point in points):
        raise TooFewAnswersError("the calls of the search do not suffice for --answer learned; give it more --minutes")
    return model, gains, order, points


def edits_of(plan: Plan, task: Task) -> Iterator[Plan]:
    """Yield the plans of a task that differ by one edit; a first early answer comes with each submit rule."""
    forms, rules = {form.name for form in task.forms}, (plan.answer,) if plan.asks_early else RULES
    for edited in _edits(plan.steps, operator_names(task.actions)):
        # A form asks; an ask that repeats another one or the last is left out.
        steps = [each for name in edited for each in ((name, ASK) if name in forms else (name,))]
        kept = [name for name, after in itertools.pairwise((*steps, ASK)) if not name == after == ASK]
        if task.rules.max_asks == 1:
            kept = [name for name in kept if name != ASK]
        for rule in rules:
            found = Plan(steps=tuple(kept))
            yield replace(found, answer=rule) if found.asks_early else found


def _edits(steps: Sequence[str], names: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yield steps with one inserted, deleted or swapped, or with one more action for a second answer."""
    count = len(steps)
    for name in names:
        if name not in steps:
            yield from ((*steps[:at], name, *steps[at:]) for at in range(count + 1))
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
        table, edited = self.table, set[Plan]()
        singles = [Plan(steps=(name,)) for name in self.names]
        by_cost = sorted(singles, key=lambda one: table.max_calls(one, self.stages[0]))
        self._race(by_cost, self.budget, int(SINGLES * self.max_calls))
        leads = {name: self._lead(name) for name in self.names}
        while (job := self._next(edited)) is not None and table.calls < self.max_calls:
            plan, budget = job
            edited.add(plan)
            plans = dict.fromkeys(edits_of(plan, table.task))
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
            plans_tried=len(set().union(*self.tried.values())),
            calls=self.table.calls,
            seconds=time.perf_counter() - self._started,
            **more,
        )

    @property
    def compared_rows(self) -> Rows:
        """Return the most questions on which plans were compared."""
        return max(filter(self.tried.get, self.stages), key=lambda rows: (len(self.tried[rows]) > 1, len(rows)))

    def score(self, plans: Iterable[Plan], rows: Rows, max_calls: int) -> None:
        """Score plans in their order while the search is sure to stay within `max_calls`."""
        waiting = [plan for plan in plans if plan not in self.tried[rows]]
        while waiting:
            totals = itertools.accumulate(self.table.max_calls(plan, rows) for plan in waiting)
            fitting = sum(1 for _ in itertools.takewhile((max_calls - self.table.calls).__ge__, totals))
            if not fitting:
                return
            now, waiting = waiting[:fitting], waiting[fitting:]
            self.table.gather(now, rows)
            self.tried[rows] |= dict.fromkeys(now)
            compared = self.compared_rows
            if (leader := self.point(self.ranked(compared, self.budget)[0], compared)) != self.best:
                self.best = leader
                self._on_best(leader)

    def ranked(self, rows: Rows, budget: float | None) -> list[Plan]:
        """Return the plans that were scored on some questions, the best first; of equal ones the shortest."""
        shortest = sorted(self.tried[rows], key=lambda plan: len(plan.steps))
        return sorted(shortest, key=lambda plan: self._figures(plan, rows, budget), reverse=True)

    def point(self, plan: Plan, rows: Rows) -> PlanPoint:
        """Return a plan's figures on the questions of a stage."""
        key = (plan, len(rows))
        if key not in self._points:
            self._points[key] = point_of(self.table, plan, rows)
        return self._points[key]

    def _figures(self, plan: Plan, rows: Rows, budget: float | None) -> tuple[float, ...]:
        """Return what a plan is ranked by: its value, or within a budget its success."""
        point = self.point(plan, rows)
        if budget is None:
            return point.value(self.price), point.success
        return point.calls <= budget, point.success, point.score, -point.calls

    def _next(self, edited: set[Plan]) -> tuple[Plan, float | None] | None:
        """Return the best plan that was not edited yet, and the budget within which its edits compete.

        The best plans are edited first, then the best one at each budget. Of plans with equal figures, which differ in
        no question, one is.
        """
        rows = self.stages[-1]
        for budget, count in ((self.budget, EDITED), *((budget, 1) for budget in FRONT)):
            different = {self._figures(plan, rows, budget): plan for plan in reversed(self.ranked(rows, budget))}
            for plan in [*reversed(different.values())][:count]:
                if plan not in edited:
                    return plan, budget
        return None

    def _race(self, plans: Iterable[Plan], budget: float | None, max_calls: int) -> None:
        """Score plans on ever more questions, the most promising first, within a number of calls of the search."""
        entered = list(dict.fromkeys([Plan(), *plans]))
        for stage, rows in enumerate(self.stages):
            left = max_calls - self.table.calls
            self.score(entered, rows, self.table.calls + left // (len(self.stages) - stage))
            ranked = [plan for plan in self.ranked(rows, budget) if plan in entered]
            entered = list(dict.fromkeys([Plan(), *ranked[: max(KEPT, 2 * len(ranked) // 3)]]))

    def _lead(self, name: str) -> float:
        """Return the lead of an action alone over the original question, where most questions were asked."""
        single = Plan(steps=(name,))
        for rows in reversed(self.stages):
            if single in self.tried[rows]:
                return self.point(single, rows).value(self.price) - self.point(Plan(), rows).value(self.price)
        return 0.0
