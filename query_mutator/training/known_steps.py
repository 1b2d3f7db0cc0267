"""Steps that cost no call: random episodes on questions with the answers that P(right) was learned from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np

from query_mutator.env.engine import EpisodeEngine
from query_mutator.env.memory import QuestionMemory
from query_mutator.env.steps import Steps
from query_mutator.env.task import Task
from query_mutator.learners.learner import Learner
from query_mutator.types import ASK, SUBMIT, ChatRequest, Completion
from rl_query_mutator_env import QueryMutationEnv

__all__ = ["RecallingLearner", "known_steps", "recall"]

_STREAM = 5  # of random numbers, in addition to those of the learners


@runtime_checkable
class RecallingLearner(Protocol):
    """A learner that learns from steps which another policy took."""

    def recall(self, steps: Steps) -> None:
        """Learn from steps before the training; `env_ids` are the numbers of their episodes, from 0 up."""


def recall(learner: Learner, task: Task, answers: Mapping[int, QuestionMemory], *, seed: int) -> None:
    """Have a learner that can learn from what is known of questions, by their number."""
    if isinstance(learner, RecallingLearner) and (steps := known_steps(task, answers, seed=seed)) is not None:
        learner.recall(steps)


def known_steps(task: Task, answers: Mapping[int, QuestionMemory], *, seed: int) -> Steps | None:
    """Return the steps [n] of a random episode on each of some questions, by number; None if there are none.

    Actions are drawn from the allowed ones that need no call whose result is not known.
    """
    env, taken = _KnownEnv(task, answers), list[tuple[Any, ...]]()
    env.np_random = np.random.default_rng((seed, _STREAM))
    for episode, question in enumerate(answers):
        try:
            obs, _ = env.reset(options={"question": question})
            while not env.has_ended and (choices := env.choices()):
                action = int(env.np_random.choice(choices))
                next_obs, reward, terminated, truncated, info = env.step(action)
                step = (obs, action, reward, next_obs, terminated, truncated)
                taken.append((episode, *step, True, 0, info["step_calls"]))
                obs = next_obs
        except _UnknownError:  # where asking is no action of its own
            continue
    return Steps(*map(np.array, zip(*taken, strict=True))) if taken else None


class _UnknownError(Exception):
    """A call whose result is not known."""


class _NoModel:
    """A client that makes no call."""

    def complete(self, request: ChatRequest) -> Completion:
        """Raise _UnknownError."""
        raise _UnknownError

    def close(self) -> None:
        """Do nothing."""


class _KnownEnv(QueryMutationEnv):
    """An environment whose target gives known answers alone."""

    def __init__(self, task: Task, answers: Mapping[int, QuestionMemory]) -> None:
        super().__init__(task, client=_NoModel())
        self._answers = answers

    def choices(self) -> list[int]:
        """Return the allowed actions whose answer, if they ask, is known."""
        assert self.engine is not None
        return [
            action for action, allowed in enumerate(self.engine.action_mask()) if allowed and self._is_known(action)
        ]

    def _open(self, question: int | None) -> EpisodeEngine:
        assert question is not None
        return EpisodeEngine.open(self.task, question, memory=self._answers[question])

    def _is_known(self, action: int) -> bool:
        assert self.engine is not None
        episode, name, form = self.engine.episode, self.task.actions[action], self.task.form_of(action)
        attempts = self._answers[episode.index].attempts
        if action < len(self.task.operators):
            return self.task.is_local(action)
        if form is not None and self.task.rules.asking.asks_forms:
            return (episode.text, form.name) in attempts
        asks = name == ASK or (name == SUBMIT and episode.best is None)
        return not asks or episode.asked in attempts
