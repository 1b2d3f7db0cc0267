"""Steps that cost no call: random episodes on the questions whose answers P(right) was learned from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from query_mutator.env.engine import EpisodeEngine
from query_mutator.env.episode import QuestionMemory
from query_mutator.env.scheduling import run_flow
from query_mutator.env.task import Task
from query_mutator.learners.learner import Learner, Steps
from query_mutator.llm.retry import DEFAULT_POLICY
from query_mutator.types import ASK, SUBMIT, ChatRequest, Completion

_STREAM = 5  # of random numbers, in addition to those of the learners


def recall(learner: Learner, task: Task, answers: Mapping[int, QuestionMemory], *, seed: int) -> None:
    """Have a learner with a method `recall`, which takes steps of another policy, learn from what is known."""
    take = getattr(learner, "recall", None)
    if take is not None and (steps := known_steps(task, answers, seed=seed)) is not None:
        take(steps)


def known_steps(task: Task, answers: Mapping[int, QuestionMemory], *, seed: int) -> Steps | None:
    """Return the steps [n] of a random episode on each of some questions, by number; None if there are none.

    Actions are drawn from the allowed ones that need no call whose result is not known.
    """
    rng, taken = np.random.default_rng((seed, _STREAM)), list[tuple[Any, ...]]()
    if task.rules.policy_asks:
        for episode, question in enumerate(answers):
            engine = EpisodeEngine.open(task, question, memory=answers[question])
            taken += [(episode, *step) for step in _steps(engine, answers[question], rng)]
    return Steps(*map(np.array, zip(*taken, strict=True))) if taken else None


def _steps(engine: EpisodeEngine, memory: QuestionMemory, rng: np.random.Generator) -> Iterator[tuple[Any, ...]]:
    """Yield the fields of Steps after the first, until the episode ends or needs a call."""
    task, episode = engine.task, engine.episode
    episode.call_price, ended = float(rng.choice(task.rules.call_price)), False
    while not ended:
        allowed = [action for action, is_allowed in enumerate(engine.action_mask()) if is_allowed]
        choices = [action for action in allowed if _is_known(action, engine, memory)]
        if not choices:
            return
        action = int(rng.choice(choices))
        obs, worth, cost = engine.observe(), engine.worth, engine.cost
        error = run_flow(engine.act(action), client=_NoModel(), encoder=task.encoder, retry_policy=DEFAULT_POLICY)
        if error is not None:  # a call whose result is not known
            return
        cost = engine.cost - cost
        reward = engine.worth - worth - episode.call_price * cost
        ended = engine.is_over
        yield obs, action, reward, engine.observe(), ended, False, True, 0, cost


def _is_known(action: int, engine: EpisodeEngine, memory: QuestionMemory) -> bool:
    """Return whether an action makes no call, or asks what has a known answer."""
    task, episode, name, form = engine.task, engine.episode, engine.task.actions[action], engine.task.form_of(action)
    if action < len(task.operators):
        return task.is_local(action) or engine.wording(action) in memory.rewrites
    if form is not None:
        return (episode.text, form.name) in memory.attempts
    asks = name == ASK or (name == SUBMIT and episode.best is None)
    return not asks or episode.asked in memory.attempts


class _NoModel:
    """A client that makes no call."""

    def complete(self, request: ChatRequest) -> Completion:
        """Return a failed completion."""
        return Completion.failed("not_asked", "its result is not known")

    def close(self) -> None:
        """Do nothing."""
