"""Candidates of a search for a plan: single actions, and every edit of a plan."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from query_mutator.env.task import Task, operator_names
from query_mutator.learners.plan import Plan
from query_mutator.types import ASK, AnswerRule

__all__ = ["Edits"]

RULES: tuple[AnswerRule, ...] = ("vote", "best")
STOP_FITS = (0.5, 0.6, 0.7, 0.8)


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
