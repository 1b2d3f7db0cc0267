"""The rows of the result table: the policy and what it has to beat, on the same questions.

    identity      the original question
    random        uniform over all actions until submit or the last step, with the rules of the policy's episodes
    best_single   the action that did best on training questions, taken once; its answer, the original is not asked
    best_of_k     a vote of the k forms that did best on training questions, after local operators that do better than
                  the original question; without forms of the original question and k - 1 rewrites. k is the smallest
                  whose calls are at least the policy's
    best_plan     with a plan search: the best plan that it found on training questions, within the budget if there is
                  one; it submits by P(right) as well where the policy does
    policy        the trained policy, greedy

Baselines make no call that they do not need: they run with `ask="form"`. Success and score are over held-out
questions; false refusals over the same (all are harmless); guard refusals over requests that should be refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from query_mutator.env.task import Task
from query_mutator.evaluation.methods import MakePlayer, always, uniform
from query_mutator.evaluation.verdict import IDENTITY, POLICY
from query_mutator.types import ASK, SUBMIT, UNDO

__all__ = [
    "BEST_OF_K",
    "BEST_SINGLE",
    "RANDOM",
    "Method",
    "asking",
    "best_of",
    "best_single",
    "chain_of",
    "standard_methods",
    "votes_on_forms",
]  # fmt: skip

BEST_OF_K, BEST_SINGLE, RANDOM = "best_of_k", "best_single", "random"


@dataclass(frozen=True, kw_only=True)
class Method:
    """A row of the table: the rules of its episodes, from those of the policy's task, and what chooses its actions."""

    name: str
    make: MakePlayer
    rules: Callable[[Task], Task] = lambda task: task


def asking(task: Task, **rules: Any) -> Task:
    """Return the task with rewriting and asking apart and with `rules`, for players that ignore observations."""
    return task.with_rules(ask="form", max_asks=None, **rules)


def chain_of(name: str, task: Task, actions: Sequence[str], **rules: Any) -> Method:
    """Return the method that takes the same actions, given by name, for every question."""
    names = asking(task).actions
    places = [names.index(action) for action in actions]
    return Method(
        name=name, make=always(places), rules=lambda task: asking(task, max_episode_steps=len(places), **rules)
    )


def standard_methods(task: Task, policy: MakePlayer, *, seed: int) -> list[Method]:
    """Return the methods that need no results of others."""
    return [
        chain_of(IDENTITY, task, [SUBMIT]),
        Method(name=RANDOM, make=uniform(seed=seed)),
        Method(name=POLICY, make=policy),
    ]


def best_single(ranking: Sequence[str], task: Task) -> Method:
    """Return one rewrite by the best operator, whose answer is submitted."""
    return chain_of(BEST_SINGLE, task, [ranking[0], SUBMIT])


def best_of_name(k: int) -> str:
    """Return the name of best-of-k while k is searched for."""
    return f"best_of_{k}"


def votes_on_forms(task: Task) -> bool:
    """Return whether best-of-k is a vote of forms."""
    return bool(task.forms)


def best_of(k: int, ranking: Sequence[str], task: Task, *, first: Sequence[str] = ()) -> Method:
    """Return best-of-k: the target is asked the original question and k - 1 rewrites of it, or `first` in k forms."""
    if votes_on_forms(task):
        forms = [name for name in ranking if name in {form.name for form in task.forms}][:k]
        return chain_of(best_of_name(k), task, [*first, *forms, SUBMIT], answer="vote")
    tries = chain.from_iterable((operator, ASK, UNDO) for operator in ranking[: k - 1])
    return chain_of(best_of_name(k), task, [ASK, *tries, SUBMIT], answer="vote")
