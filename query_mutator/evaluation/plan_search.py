"""Search for the best plan on training questions, by a race (`PlanRace`) or, with many calls, widely:

    candidates   the original question, single operators; then every edit of the best plan: insert, delete
                 and swap operators, insert and delete ask points, add a second answer
    race         a tenth of the questions, then twice as many for the best quarter, and so on; finalists on all
    variants     every submit rule and stop threshold of the plan that is edited, on all questions: they share its calls
    next         edit the best plan that was not edited yet, the best one at each budget, and the best that ask once:
                 an early answer is a gain that hides better chains; until none is left

With few calls for each question the race goes over paired questions:

    single actions   the original question and every action alone, with at most `SINGLES` of the calls
    compositions     edits of the best plan; those of the most promising actions first
    race             eight questions, then twice as many, at last all. Plans that are surely worse than the best on the
                     same questions leave; so do the last ones of those that half of the calls left would not pay for

What finishing the two best candidates takes is set aside, so a race always ends with plans scored on all questions.
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

from query_mutator.env.task import Task, operator_names
from query_mutator.errors import TooFewAnswersError, UsageError
from query_mutator.evaluation.plan_learned import LearnedPlans, learned_plans
from query_mutator.evaluation.plan_trials import BUDGETS, PlanPoint, PlanSearch, Rows, Trials
from query_mutator.evaluation.plans import Caller, PlanScores
from query_mutator.learners.plan import Plan
from query_mutator.types import ASK, AnswerRule

RULES: tuple[AnswerRule, ...] = ("vote", "best")
STOP_FITS = (0.5, 0.6, 0.7, 0.8)

FIRST_QUESTIONS = 8
SINGLES = 0.6  # share of the calls for actions alone
SURE = 1.65  # standard errors behind the best: 95 %, one-sided
RACE_EDITED = 6  # best plans to edit
SHRINK = 16  # questions after which half of an action's lead is believed

MAX_CALLS = 20_000
EDITED = (3, 6, 12)  # best plans to edit, more of them while calls are left
MIN_CALLS = 20
CALLS_PER_QUESTION, RACE_CALLS_PER_QUESTION = 13, 15  # at least; fewer calls score fewer questions
#: Of the calls, at most, for the first stage of a wide search, at so many calls a question; else a race does better.
WIDE_SHARE, WIDE_CALLS_PER_QUESTION = 0.25, 20
MIN_KEPT = 3  # candidates of a race at every stage
#: Share of the questions, and of the calls that may be spent when a race is at it: the rest is for the finalists.
STAGES = ((0.1, 0.9), (0.2, 0.94), (0.4, 0.97), (1.0, 1.0))
RACE_QUESTIONS = 48  # at least, where there are as many: fewer say nothing about a plan
SEARCHED_SHARE = 2 / 3  # of calls and time, where P(right) is learned: the rest asks in all forms
SHOWN_CHARACTERS = 32  # of a plan in the bar


class Edits:
    """The plans that a task's actions allow; `has_no_effect` says whether one leaves every original question alone."""

    def __init__(self, task: Task, *, has_no_effect: Callable[[str], bool] = lambda name: False) -> None:
        self.names = operator_names(task.actions)
        self.singles = [Plan(steps=(name,)) for name in self.names]
        self._forms = {form.name for form in task.forms}
        self._may_ask_early = task.rules.max_asks != 1
        self._has_no_effect = has_no_effect

    @property
    def first_calls(self) -> int:
        """Return the calls of single actions for one question, at most."""
        return 2 * len(self.singles)

    def of(self, plan: Plan) -> Iterator[Plan]:
        """Yield the plans that differ by one edit; a first early answer comes with each submit rule."""
        rules = (plan.answer,) if plan.asks_early else RULES
        for steps in self._edits(plan.steps):
            yield from (self._made(steps, rule, plan.stop_fit) for rule in rules)

    def _edits(self, steps: Sequence[str]) -> Iterator[Sequence[str]]:
        """Yield steps with one inserted, deleted or swapped, or with one more action for a second answer."""
        count = len(steps)
        for name in self.names:
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
        """Return the plan of these steps, with the ask of each form and without those that repeat one or the last."""
        steps = [each for name in steps for each in ((name, ASK) if name in self._forms else (name,))]
        kept = [name for name, after in itertools.pairwise((*steps, ASK)) if not name == after == ASK]
        if not self._may_ask_early:
            kept = [name for name in kept if name != ASK]
        if ASK not in kept:
            return Plan(steps=tuple(kept))
        return Plan(steps=tuple(kept), answer=rule, stop_fit=stop_fit)

    def variants(self, plan: Plan) -> list[Plan]:
        """Return a plan under every submit rule and stop threshold, which share most of their calls."""
        pairs = itertools.product(RULES, (None, *STOP_FITS)) if plan.asks_early else ()
        return [replace(plan, answer=rule, stop_fit=fit) for rule, fit in pairs]


def race_sizes(count: int) -> list[int]:
    """Return how many questions each stage has."""
    doubled = itertools.takewhile(
        lambda size: size < count, (FIRST_QUESTIONS * 2**stage for stage in itertools.count())
    )
    return [*doubled, count]


class PlanRace:
    """The races of a search."""

    def __init__(self, trials: Trials, edits: Edits) -> None:
        self._trials, self._edits = trials, edits

    def run(self) -> None:
        """Race single actions, then edits of the best plans, until calls or ideas run out."""
        trials = self._trials
        cheap_first = sorted(self._edits.singles, key=lambda one: trials.scores.max_calls(one, trials.rows[0]))
        self._race(cheap_first, SINGLES)
        edited: set[Plan] = set()
        while (plan := self._next(edited)) is not None:
            edited.add(plan)
            plans = dict.fromkeys(self._edits.of(plan))
            leads = {name: self._lead(name) for name in self._edits.names}
            by_promise = sorted(plans, key=lambda one: sum(leads[name] for name in one.operators), reverse=True)
            if not self._race(by_promise):
                return
            trials.score(self._edits.variants(plan), trials.rows[-1])

    def _next(self, edited: set[Plan]) -> Plan | None:
        """Return the best plan that was not edited yet."""
        rows = self._trials.rows[-1]
        best = [
            group[0] for group in self._trials.ranked(self._trials.tried[rows], rows, self._trials.budget)[:RACE_EDITED]
        ]
        return next((plan for plan in best if plan not in edited), None)

    def _race(self, plans: Iterable[Plan], share: float = 1.0) -> bool:
        """Score plans on ever more questions, the most promising first, with a share of the search's calls.

        Return False where they do not suffice.
        """
        trials, scores, whole = self._trials, self._trials.scores, self._trials.rows[-1]
        calls, rows = scores.calls, trials.rows[0]
        left = int(share * trials.max_calls) - calls
        most = left * len(rows) / len(whole)  # what a plan may take at first, to be scored on all questions
        entered = list(dict.fromkeys([Plan(), *(plan for plan in plans if scores.max_calls(plan, rows) <= most)]))
        for rows in trials.rows:
            entered = self._affordable(entered, rows, share)
            trials.score(entered, rows, share)
            entered = self._not_surely_worse([plan for plan in entered if plan in trials.tried[rows]], rows)
        return scores.calls > calls

    def _affordable(self, plans: Sequence[Plan], rows: Rows, share: float) -> list[Plan]:
        """Return the plans to score on more questions: the first ones that half of the calls left pay for."""
        scores, whole = self._trials.scores, self._trials.rows[-1]
        unfinished = filter(None, (scores.max_calls(plan, whole) for plan in plans))
        left = int(share * self._trials.max_calls) - scores.calls - sum(itertools.islice(unfinished, 2))
        room = left if rows == whole else left / 2
        kept = list(plans[:2])
        for plan in plans[2:]:
            if (cost := scores.max_calls(plan, rows)) <= room:
                room -= cost
                kept.append(plan)
        return kept

    def _not_surely_worse(self, plans: Sequence[Plan], rows: Rows) -> list[Plan]:
        """Return the original question and, the best first, the plans that may still be the best."""
        trials = self._trials
        ranked = [plan for group in trials.ranked(trials.tried[rows], rows, trials.budget) for plan in group]
        entered = set(plans)
        kept = [plan for plan in ranked if plan in entered and not self._is_surely_worse(plan, ranked[0], rows)]
        return list(dict.fromkeys([Plan(), *kept]))

    def _is_surely_worse(self, plan: Plan, best: Plan, rows: Rows) -> bool:
        leads = self._trials.gains(plan, rows) - self._trials.gains(best, rows)
        leads = leads[~np.isnan(leads)]
        count = max(1, len(leads))
        spread = math.sqrt((float(leads.var()) + 1 / count) / count) if len(leads) else math.inf
        return bool(leads.sum() / count + SURE * spread < 0)

    def _lead(self, name: str) -> float:
        """Return the mean lead of an action alone over the original question, less for few questions."""
        trials, single = self._trials, Plan(steps=(name,))
        rows = next((rows for rows in reversed(trials.rows) if single in trials.tried[rows]), None)
        if rows is None:
            return 0.0
        leads = trials.gains(single, rows) - trials.gains(Plan(), rows)
        return float(np.nansum(leads)) / (len(rows) + SHRINK)


def find_plan(
    caller: Caller,
    task: Task,
    *,
    max_calls: int,
    seconds: float | None = None,
    seed: int = 0,
    budget: float | None = None,
    learned: bool = False,
    progress: Callable[[str, int], Any] | None = None,
    on_best: Callable[[PlanPoint], Any] = lambda point: None,
) -> PlanSearch:
    """Return the plans found on the questions of a task (training questions) with at most `max_calls` calls.

    With `seconds` it ends by then, give or take a few seconds, with what was found on the questions scored so far.
    `budget` bounds the mean calls per question of the plan to choose. Few calls score fewer questions, a random sample.
    With `learned` a third of it asks in all forms, for plans that submit the answer that is most likely right; where
    that does not suffice the result says why it has none.
    `caller` is an `Evaluator`. `on_best` is called with each plan that is the best one so far, on the questions scored
    so far. UsageError for too few calls.
    """
    check_calls(max_calls)
    started = time.perf_counter()
    with closing(_Bar(progress, max_calls)) as bar:
        scores = PlanScores(caller, task, on_call=lambda: bar.update(trials.max_calls))
        edits = Edits(scores.task, has_no_effect=lambda name: trials.has_no_effect(name))
        wide = is_wide(scores.task, max_calls)
        share = SEARCHED_SHARE if learned else 1.0
        count = questions_searched(len(task.questions), max_calls, is_wide=wide, learned=learned)
        order = np.random.default_rng(seed).permutation(len(task.questions))[:count].tolist()
        rows = [tuple(order[:size]) for size in (_sizes(count) if wide else race_sizes(count))]
        trials = Trials(
            scores,
            rows,
            max_calls=int(share * max_calls),
            seconds=seconds and share * seconds,
            budget=budget,
            on_best=[bar.show, on_best],
        )
        (_WideSearch(trials, edits) if wide else PlanRace(trials, edits)).run()
        found: LearnedPlans | str = ""
        if learned:
            trials.extend(max_calls, seconds)
            try:
                found = learned_plans(trials, budget=budget, seed=seed)
            except TooFewAnswersError as error:
                found = str(error)
    search = trials.result(seconds=time.perf_counter() - started)
    return replace(search, not_learned=found) if isinstance(found, str) else _with_learned(search, found, trials)


def _with_learned(search: PlanSearch, found: LearnedPlans, trials: Trials) -> PlanSearch:
    """Return a search with the plans that submit by P(right), whose figures are out of fold."""
    points = sorted([*search.points, *found.points], key=trials.value_of, reverse=True)
    whole = replace(search, points=tuple(points), confidence=found.confidence)
    chosen = whole.chosen
    if chosen.plan.answer != "learned":
        return whole
    lead = trials.value_of(chosen) - trials.value_of(whole.original)
    return replace(whole, cross_fitted=chosen.success, cross_fitted_lead=lead)


def is_wide(task: Task, max_calls: int) -> bool:
    """Return whether a search is wide: with many calls."""
    first = min(_sizes(min(len(task.questions), max(1, max_calls // WIDE_CALLS_PER_QUESTION))))
    return WIDE_SHARE * max_calls >= first * Edits(task).first_calls


def questions_searched(num_questions: int, max_calls: int, *, is_wide: bool, learned: bool = False) -> int:
    """Return how many of the questions a search scores."""
    calls = int(SEARCHED_SHARE * max_calls) if learned else max_calls
    return min(num_questions, max(1, calls // (CALLS_PER_QUESTION if is_wide else RACE_CALLS_PER_QUESTION)))


def _sizes(count: int) -> list[int]:
    """Return how many questions each stage of a wide search has."""
    return [min(count, max(RACE_QUESTIONS, round(share * count))) for share, _ in STAGES]


def check_calls(max_calls: int, *, name: str = "max_calls") -> None:
    """Raise a UsageError for too few calls to search with; `name` is that of the setting."""
    if max_calls < MIN_CALLS:
        raise UsageError(f"{name}={max_calls} is too few to search for a plan; use {MIN_CALLS} or more")


class _Bar:
    """One bar for a whole search: calls made of the bound, calls per second, the best plan so far."""

    def __init__(self, progress: Callable[[str, int], Any] | None, max_calls: int) -> None:
        self._best = ""
        self._started = time.perf_counter()
        self._bar = progress("plan search", max_calls) if progress else None
        if self._bar is not None:
            self._bar.figures = self._figures

    def update(self, max_calls: int) -> None:
        """Count a call of those that the search will have made at its end."""
        if self._bar is not None:
            self._bar.total = max_calls
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


class _WideSearch:
    """The rounds of a search with many calls."""

    def __init__(self, trials: Trials, edits: Edits) -> None:
        self._trials, self._edits = trials, edits

    def run(self) -> None:
        """Race the simplest plans, then edits of the best, until calls or ideas run out."""
        trials, edits = self._trials, self._edits
        trials.score([Plan()], trials.rows[-1])
        for budget in (None, *BUDGETS):
            self._race(edits.singles, budget)
        edited: set[Plan] = set()
        for num_best in EDITED:
            while (job := self._next_job(edited, num_best)) is not None and trials.scores.calls < trials.max_calls:
                plan, budget = job
                edited.add(plan)
                trials.score(edits.variants(plan), trials.rows[-1], STAGES[-2][1])
                self._race(list(dict.fromkeys(edits.of(plan))), budget)

    def _next_job(self, edited: set[Plan], num_best: int) -> tuple[Plan, int | None] | None:
        """Return the next plan to edit, and the budget within which its edits compete; None at the end."""
        rows = self._trials.rows[-1]
        tried, ranked = self._trials.tried[rows], self._trials.ranked
        chains = [plan for plan in tried if not plan.asks_early]
        by_value = (_distinct(group[0] for group in ranked(plans, rows)) for plans in (tried, chains))
        best = [(plan, None) for plans in by_value for plan in plans[:num_best]]
        within = [(budget, ranked(tried, rows, budget)[:1]) for budget in BUDGETS]
        at_budgets = [(group[0], budget) for budget, groups in within for group in groups]
        return next((job for job in (*best[:1], *at_budgets, *best[1:]) if job[0] not in edited), None)

    def _race(self, plans: Sequence[Plan], budget: int | None) -> None:
        """Score plans on ever more questions, the best quarter at each stage."""
        trials = self._trials
        for rows, (_, share) in zip(trials.rows, STAGES, strict=True):
            trials.score(plans, rows, share)
            groups = trials.ranked([plan for plan in plans if plan in trials.tried[rows]], rows, budget)
            kept = groups[: max(MIN_KEPT if budget is None else 1, len(groups) // 4)]
            plans = [plan for group in kept for plan in group]


def _distinct(plans: Iterable[Plan]) -> list[Plan]:
    """Return the first plan of each order of steps."""
    found: dict[Sequence[str], Plan] = {}
    for plan in plans:
        found.setdefault(plan.steps, plan)
    return list(found.values())
