"""Candidates of a search for a plan: single actions, chains known to do well, and every edit of a plan."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from query_mutator.env.task import Task, operator_names
from query_mutator.learners.plan import PLAN_ANSWERS, Plan
from query_mutator.types import ASK, AnswerRule

__all__ = ["Edits"]

#: Plans known to do well, with the rule `round_trip`; those that a task has no operators or mutator for are left out.
SEED_CHAINS = (
    ("spelling", "slang", "expand", "neutral"),
    ("spelling", "slang", "expand", "terms", "neutral"),
    ("expand", "neutral"),
    ("grammar", "spelling", "neutral", "slang", "expand", "terms", "emphasize"),
    ("grammar", "spelling", "neutral", "slang", "expand", "terms", "emphasize", ASK, "how_to"),
)
RULES: tuple[AnswerRule, ...] = ("best", "round_trip", "closest", "last")  # with a mutator that rewrites by rules
MODEL_RULES: tuple[AnswerRule, ...] = ("vote", "best", "closest", "last")  # no further call for an answer
FIRST_RULES = 2  # for a plan that asked once before
STOP_FITS = (0.5, 0.6, 0.7, 0.8)


class Edits:
    """The plans that a task's actions allow; `has_no_effect` says whether one leaves every original question alone."""

    def __init__(self, task: Task, *, has_no_effect: Callable[[str], bool] = lambda name: False) -> None:
        self.names = operator_names(task.actions)
        self.singles = [Plan(steps=(name,)) for name in self.names]
        self.rules = RULES if task.calls.by_rules else MODEL_RULES
        self._may_ask_early = task.rules.max_asks != 1
        self._has_no_effect = has_no_effect
        chains = [chain for chain in SEED_CHAINS if set(chain) <= {*self.names, ASK}]
        self.chains = [self._made(chain, "round_trip", None) for chain in chains if "round_trip" in self.rules]

    @property
    def first_calls(self) -> int:
        """Return the calls of single actions and chains for one question, at most."""
        return sum(len(plan.operators) + 1 for plan in (*self.singles, *self.chains))

    def of(self, plan: Plan) -> Iterator[Plan]:
        """Yield the plans that differ by one edit; a first early answer comes with each of two submit rules."""
        rules = (plan.answer,) if plan.asks_early else self.rules[:FIRST_RULES]
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
        """Return the plan of these steps, without asks that repeat the one before or the last."""
        kept = [name for name, after in itertools.pairwise((*steps, ASK)) if not name == after == ASK]
        if not self._may_ask_early:
            kept = [name for name in kept if name != ASK]
        if ASK not in kept:
            return Plan(steps=tuple(kept))
        return Plan(steps=tuple(kept), answer=rule, stop_fit=stop_fit)

    def variants(self, plan: Plan) -> list[Plan]:
        """Return a plan under every submit rule and stop threshold, which share most of their calls."""
        rules = [rule for rule in PLAN_ANSWERS if rule in self.rules]
        pairs = itertools.product(rules, (None, *STOP_FITS)) if plan.asks_early else ()
        return [replace(plan, answer=rule, stop_fit=fit) for rule, fit in pairs]
