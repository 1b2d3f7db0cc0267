"""Question sets whose packages score the answers themselves: `reasoning-gym:TASK` and `verifiers:PACKAGE`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from query_mutator.data import reasoning_gym, taskset
from query_mutator.types import REASONING_GYM, VERIFIERS, Question

__all__ = ["VERIFIED_SETS", "is_verified", "scored_by"]

#: What such a `--dataset` begins with -> what reads it.
VERIFIED_SETS: Mapping[str, Callable[[str], list[Question]]] = {
    reasoning_gym.PREFIX: reasoning_gym.verified_questions,
    taskset.PREFIX: taskset.taskset_questions,
}


def is_verified(dataset: str) -> bool:
    """Return whether `--dataset` names such a set."""
    return dataset.startswith(tuple(VERIFIED_SETS))


def scored_by(question: Question) -> str | None:
    """Return the package that scores the answers to a question, None for those of other sets."""
    return next((name for name in (REASONING_GYM, VERIFIERS) if name in question.tags), None)
