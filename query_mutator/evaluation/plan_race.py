"""Search for a plan with few calls for each question: race single actions, then edits of the best, on paired questions.

    single actions   the original question and every action alone, with at most `SINGLES` of the calls
    compositions     edits of the best plan; those of the most promising actions first
    race             eight questions, then twice as many, at last all. Plans that are surely worse than the best on the
                     same questions leave; so do the last ones of those that half of the calls left would not pay for

What finishing the two best candidates takes is set aside, so a race always ends with plans scored on all questions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

import numpy as np

from query_mutator.evaluation.plan_edits import Edits
from query_mutator.evaluation.plan_trials import Rows, Trials
from query_mutator.learners.plan import Plan

__all__ = ["PlanRace", "race_sizes"]

FIRST_QUESTIONS = 8
SINGLES = 0.6  # share of the calls for actions alone
SURE = 1.65  # standard errors behind the best: 95 %, one-sided
EDITED = 6  # best plans to edit
SHRINK = 16  # questions after which half of an action's lead is believed


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
        best = [group[0] for group in self._trials.ranked(self._trials.tried[rows], rows, self._trials.budget)[:EDITED]]
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
