"""Search for the best plan on training questions: edits of the best plan so far, raced on ever more questions.

    candidates   the original question, single operators, seed chains; then every edit of the best plan: insert, delete
                 and swap operators, insert and delete ask points, add a second answer
    race         a tenth of the questions, then twice as many for the best quarter, and so on; finalists on all
    variants     every submit rule and stop threshold of the plan that is edited, on all questions: they share its calls
    next         edit the best plan that was not edited yet, the best one at each budget, and the best that ask once:
                 an early answer is a gain that hides better chains; until none is left

Plans are scored from remembered calls; only missing calls are made, those of all candidates of a round in one pool.
"""

from __future__ import annotations

import itertools
import math
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np

from query_mutator.data.split import FOLDS, fold_of
from query_mutator.env.task import Task, operator_names
from query_mutator.errors import UsageError
from query_mutator.evaluation.plan_result import BUDGETS, PlanPoint, PlanSearch
from query_mutator.evaluation.plans import Caller, PlanScores
from query_mutator.learners.plan import PLAN_ANSWERS, Plan
from query_mutator.stats.intervals import Floats, wilson_interval
from query_mutator.types import ASK, AnswerRule

__all__ = ["CALLS_PER_QUESTION", "MAX_CALLS", "check_calls", "find_plan"]

#: Plans known to do well, with the rule `round_trip`; those with an operator that the task lacks are left out.
SEED_CHAINS = (
    ("spelling", "slang", "expand", "neutral"),
    ("spelling", "slang", "expand", "terms", "neutral"),
    ("expand", "neutral"),
    ("grammar", "spelling", "neutral", "slang", "expand", "terms", "emphasize"),
    ("grammar", "spelling", "neutral", "slang", "expand", "terms", "emphasize", ASK, "how_to"),
)
MAX_CALLS = 20_000
FIRST_RULES: tuple[AnswerRule, ...] = ("best", "round_trip")  # of a plan that asked once before
STOP_FITS = (0.5, 0.6, 0.7, 0.8)
EDITED = (3, 6, 12)  # best plans to edit, more of them while calls are left
CALLS_PER_QUESTION = 20  # at least; fewer calls score fewer questions
MIN_KEPT = 3  # candidates of a race at every stage
#: Share of the questions, and of the calls that may be spent when a race is at it: the rest is for the finalists.
STAGES = ((0.1, 0.9), (0.2, 0.94), (0.4, 0.97), (1.0, 1.0))
RACE_QUESTIONS = 48  # at least, where there are as many: fewer say nothing about a plan
SHOWN_CHARACTERS = 32  # of a plan in the bar

Rows = tuple[int, ...]  # indices of questions


def find_plan(
    caller: Caller,
    task: Task,
    *,
    max_calls: int,
    seed: int = 0,
    budget: float | None = None,
    progress: Callable[[str, int], Any] | None = None,
) -> PlanSearch:
    """Return the plans found on the questions of a task (training questions) with at most `max_calls` calls.

    `budget` bounds the mean calls per question of the plan to choose. Few calls score fewer questions, a random sample.
    `caller` is an `Evaluator`. UsageError for too few calls.
    """
    check_calls(max_calls)
    started = time.perf_counter()
    with closing(_Bar(progress, max_calls)) as bar:
        scores = PlanScores(caller, task, on_call=bar.update)
        search = _Search(scores, max_calls=max_calls, seed=seed, on_best=bar.show)
        search.run()
    points = sorted(map(search.point, search.tried[search.rows[-1]]), key=lambda point: len(point.plan.steps))
    points.sort(key=search.value_of, reverse=True)
    cross_fitted, lead = search.cross_fitted([point.plan for point in points], budget)
    return PlanSearch(
        points=tuple(points),
        budget=budget,
        cross_fitted=cross_fitted,
        cross_fitted_lead=lead,
        plans_tried=len(search.tried[search.rows[0]]),
        calls=scores.calls,
        seconds=time.perf_counter() - started,
        rewrites=scores.rewrites,
    )


def check_calls(max_calls: int, *, name: str = "max_calls") -> None:
    """Raise a UsageError for too few calls to search with; `name` is that of the setting."""
    if max_calls < CALLS_PER_QUESTION:
        raise UsageError(f"{name}={max_calls} is too few to search for a plan; use {CALLS_PER_QUESTION} or more")


class _Bar:
    """One bar for a whole search: calls made of the bound, calls per second, the best plan so far."""

    def __init__(self, progress: Callable[[str, int], Any] | None, max_calls: int) -> None:
        self._best = ""
        self._started = time.perf_counter()
        self._bar = progress("plan search", max_calls) if progress else None
        if self._bar is not None:
            self._bar.figures = self._figures

    def update(self) -> None:
        """Count a call."""
        if self._bar is not None:
            self._bar.update()

    def show(self, best: PlanPoint) -> None:
        """Show a plan as the best one so far."""
        self._best = f"best {best.success:.0%} {textwrap.shorten(str(best.plan), SHOWN_CHARACTERS, placeholder=' …')}"

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()

    def _figures(self) -> list[str]:
        assert self._bar is not None
        rate = self._bar.n / max(1e-9, time.perf_counter() - self._started)
        return [f"{self._bar.n}/{self._bar.total}", f"{rate:.3g} calls/s", *filter(None, [self._best])]


class _Search:
    """The rounds of a search; `tried` are the plans that were scored on the questions of each stage."""

    def __init__(self, scores: PlanScores, *, max_calls: int, seed: int, on_best: Callable[[PlanPoint], None]) -> None:
        self.scores, self.max_calls = scores, max_calls
        self.best: PlanPoint | None = None  # on all questions
        self._on_best = on_best
        task = scores.task
        count = min(len(task.questions), max(1, max_calls // CALLS_PER_QUESTION))
        order = np.random.default_rng(seed).permutation(len(task.questions))[:count].tolist()
        self.rows = [tuple(order[: max(RACE_QUESTIONS, round(share * count))]) for share, _ in STAGES]
        self.tried: dict[Rows, dict[Plan, None]] = {rows: {} for rows in self.rows}
        self._points: dict[tuple[Plan, int], PlanPoint] = {}
        self.price = float(np.mean(task.rules.call_price))
        self.operators = operator_names(task.actions)
        self.may_ask_early = task.rules.max_asks != 1

    def run(self) -> None:
        """Race the simplest plans and the seed chains, then edits of the best, until calls or ideas run out."""
        chains = [chain for chain in SEED_CHAINS if set(chain) <= {*self.operators, ASK}]
        singles = [Plan(steps=(name,)) for name in self.operators]
        self._try([Plan()], self.rows[-1], self.max_calls)
        for budget in (None, *BUDGETS):
            self._race([*singles, *(self._made(chain, "round_trip", None) for chain in chains)], budget)
        edited: set[Plan] = set()
        limit = int(STAGES[-2][1] * self.max_calls)
        for num_best in EDITED:
            while (job := self._next_job(edited, num_best)) is not None and self.scores.calls < self.max_calls:
                plan, budget = job
                edited.add(plan)
                self._try(_variants(plan), self.rows[-1], limit)
                self._race(list(dict.fromkeys(self._neighbors(plan))), budget)

    def _next_job(self, edited: set[Plan], num_best: int) -> tuple[Plan, int | None] | None:
        """Return the next plan to edit, and the budget within which its edits compete; None at the end."""
        rows = self.rows[-1]
        chains = [plan for plan in self.tried[rows] if not plan.asks_early]
        ranked = (_distinct(group[0] for group in self._ranked(plans, rows)) for plans in (self.tried[rows], chains))
        best = [(plan, None) for plans in ranked for plan in plans[:num_best]]
        within = [(budget, self._ranked(self.tried[rows], rows, budget)[:1]) for budget in BUDGETS]
        at_budgets = [(group[0], budget) for budget, groups in within for group in groups]
        return next((job for job in (*best[:1], *at_budgets, *best[1:]) if job[0] not in edited), None)

    def _race(self, plans: Sequence[Plan], budget: int | None) -> None:
        """Score plans on ever more questions, the best quarter at each stage."""
        for rows, (_, share) in zip(self.rows, STAGES, strict=True):
            self._try(plans, rows, int(share * self.max_calls))
            groups = self._ranked([plan for plan in plans if plan in self.tried[rows]], rows, budget)
            kept = groups[: max(MIN_KEPT if budget is None else 1, len(groups) // 4)]
            plans = [plan for group in kept for plan in group]

    def _try(self, plans: Iterable[Plan], rows: Rows, limit: int) -> None:
        """Score plans in their order while their calls are sure to fit the limit."""
        waiting = [plan for plan in plans if plan not in self.tried[rows]]
        while waiting:
            left, fitting = limit - self.scores.calls, 0
            for plan in waiting:
                left -= self.scores.max_calls(plan, rows)
                if left < 0:
                    break
                fitting += 1
            if not fitting:
                return
            self.scores.gather(waiting[:fitting], rows)
            self.tried[rows] |= dict.fromkeys(waiting[:fitting])
            if rows == self.rows[-1]:
                self._note_best(waiting[:fitting])
            waiting = waiting[fitting:]

    def _note_best(self, plans: Iterable[Plan]) -> None:
        """Call `on_best` if one of the plans, scored on all questions, is better than all before."""
        for point in map(self.point, plans):
            if self.best is None or self.value_of(point) > self.value_of(self.best):
                self.best = point
                self._on_best(point)

    def _ranked(self, plans: Iterable[Plan], rows: Rows, budget: int | None = None) -> list[list[Plan]]:
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

    def point(self, plan: Plan, rows: Rows | None = None) -> PlanPoint:
        """Return a plan's figures on `rows`, by default on all questions of the search."""
        rows = rows or self.rows[-1]
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

    def cross_fitted(self, plans: Sequence[Plan], budget: float | None) -> tuple[float, float]:
        """Return success on each fold of the plan that is best on the other four, over all questions, and its lead.

        The lead over the original question is in score minus the price of calls; -inf where all questions are one fold.
        """
        rows = self.rows[-1]
        folds = np.array([fold_of(self.scores.task.questions[row]) for row in rows])
        results = [self.scores.results(plan, rows) for plan in plans]
        right, scores, calls = (
            np.array([[getattr(result, name) for result in row] for row in results], dtype=np.float64)  # [P, Q]
            for name in ("success", "score", "calls")
        )
        values = scores - self.price * calls
        chosen = np.full(len(rows), -1)
        for fold in range(FOLDS):
            inside = folds == fold
            if inside.any() and not inside.all():
                of_others = (each[:, ~inside].mean(axis=1) for each in (values, right, scores, calls))
                chosen[inside] = _choice(*of_others, budget=budget)
        if (chosen < 0).any():
            return 0.0, -math.inf
        columns = np.arange(len(rows))
        lead = values[chosen, columns].mean() - values[plans.index(Plan())].mean()
        return float(right[chosen, columns].mean()), float(lead)

    def _has_no_effect(self, name: str) -> bool:
        """Return whether an operator leaves every original question as it is."""
        rows, plan = self.rows[0], Plan(steps=(name,))
        return plan in self.tried[rows] and self.point(plan, rows) == replace(self.point(Plan(), rows), plan=plan)

    def _neighbors(self, plan: Plan) -> Iterator[Plan]:
        """Yield the plans that differ by one edit; a first early answer comes with each of two submit rules."""
        rules = (plan.answer,) if plan.asks_early else FIRST_RULES
        for steps in self._edits(plan.steps):
            yield from (self._made(steps, rule, plan.stop_fit) for rule in rules)

    def _edits(self, steps: Sequence[str]) -> Iterator[Sequence[str]]:
        """Yield steps with one inserted, deleted or swapped, or with one more operator for a second answer."""
        count = len(steps)
        for name in self.operators:
            if name not in steps:  # some work on an answer only
                for new in ((name,), (ASK, name)) if self._has_no_effect(name) else ((name,),):
                    yield from ((*steps[:at], *new, *steps[at:]) for at in range(count + 1))
                yield *steps, ASK, name
        yield from ((*steps[:at], *steps[at + 1 :]) for at in range(count))
        for one, other in itertools.combinations(range(count), 2):
            swapped = list(steps)
            swapped[one], swapped[other] = steps[other], steps[one]
            yield swapped
        yield from ((*steps[:at], ASK, *steps[at:]) for at in range(count))

    def _made(self, steps: Sequence[str], rule: AnswerRule, stop_fit: float | None) -> Plan:
        """Return the plan of these steps, without asks that repeat the one before or the last."""
        kept = [name for name, after in itertools.pairwise((*steps, ASK)) if not name == after == ASK]
        if not self.may_ask_early:
            kept = [name for name in kept if name != ASK]
        if ASK not in kept:
            return Plan(steps=tuple(kept))
        return Plan(steps=tuple(kept), answer=rule, stop_fit=stop_fit)


def _variants(plan: Plan) -> list[Plan]:
    """Return a plan under every submit rule and stop threshold, which share most of their calls."""
    pairs = itertools.product(PLAN_ANSWERS, (None, *STOP_FITS)) if plan.asks_early else ()
    return [replace(plan, answer=rule, stop_fit=fit) for rule, fit in pairs]


def _distinct(plans: Iterable[Plan]) -> list[Plan]:
    """Return the first plan of each order of steps."""
    found: dict[Sequence[str], Plan] = {}
    for plan in plans:
        found.setdefault(plan.steps, plan)
    return list(found.values())


def _choice(values: Floats, right: Floats, scores: Floats, calls: Floats, *, budget: float | None) -> int:
    """Return the index of the plan of the largest value; with a budget, of the best success among those within it."""
    if budget is None:
        return int(values.argmax())
    within = np.where(calls <= budget, right, -math.inf)
    return int(np.lexsort((-calls, scores, within))[-1])


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else 0.0
