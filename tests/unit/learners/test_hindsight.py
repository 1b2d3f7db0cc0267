"""Demonstrations in hindsight equal those of an episode without the rewrites that changed nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from query_mutator import forms
from query_mutator.env.task import Task
from query_mutator.learners.hindsight import Relabel, relabel
from query_mutator.learners.plan import Plan
from query_mutator.llm.client import Client
from query_mutator.operators import LocalOperator, OperatorContext
from query_mutator.training.config import TrainConfig
from query_mutator.training.learner import teach
from rl_query_mutator_env import QueryMutationEnv

SPELLING, NEUTRAL, FILLER, ASK, UNDO, SUBMIT = range(6)
KILL = {"question": 1}
STEPS = 6


def same(text: str, context: OperatorContext) -> str:
    return text


def soften(text: str, context: OperatorContext) -> str:
    return text.replace("kill", "stop")


@pytest.fixture
def task(tiny_task: Callable[..., Task]) -> Task:
    """A task in which only `neutral` changes a question."""
    rules = {"spelling": same, "neutral": soften, "filler": same}
    operators = [LocalOperator(name=name, summary="", function=rule) for name, rule in rules.items()]
    return replace(tiny_task(ask="form", max_episode_steps=STEPS, skip_unchanged=False), operators=tuple(operators))


def walk(task: Task, client: Client, actions: Sequence[int]) -> np.ndarray:
    """Return the observations before the actions of an episode [T, 1, D]."""
    env = QueryMutationEnv(task, client=client)
    obs, _ = env.reset(options=KILL)
    seen = []
    for action in actions:
        seen.append(obs)
        obs, *_ = env.step(action)
    return np.stack(seen)[:, None].astype(np.float32)


def relabeled(task: Task, obs: np.ndarray, taken: Sequence[int]) -> list[int]:
    """Relabel the observations of one environment in place; return the actions."""
    actions = np.array(taken)[:, None]
    relabel(obs, actions, actions == SUBMIT, observer=task.observer, num_operators=len(task.operators), max_steps=STEPS)
    return [int(action) for action in actions[:, 0]]


def test_steps_without_effect_show_the_next_one_that_has_an_effect(task: Task, tiny_client: Client) -> None:
    taken = [FILLER, SPELLING, NEUTRAL, FILLER, ASK, SUBMIT]
    obs = walk(task, tiny_client, taken)
    before = obs.copy()
    assert relabeled(task, obs, taken) == [NEUTRAL, NEUTRAL, NEUTRAL, ASK, ASK, SUBMIT]
    # With an effect: as if the others had not been requested. Without: as it was, that rewrite having been tried.
    np.testing.assert_allclose(obs[[2, 4, 5]], walk(task, tiny_client, [NEUTRAL, ASK, SUBMIT]), atol=1e-6)
    np.testing.assert_array_equal(obs[[0, 1, 3]], before[[0, 1, 3]])


def test_the_next_episode_starts_without_skipped_operators(task: Task, tiny_client: Client) -> None:
    taken = [FILLER, SUBMIT]
    obs = np.concatenate([walk(task, tiny_client, taken), walk(task, tiny_client, [NEUTRAL, SUBMIT])])
    second = obs[2:].copy()
    assert relabeled(task, obs, [*taken, NEUTRAL, SUBMIT]) == [SUBMIT, SUBMIT, NEUTRAL, SUBMIT]
    np.testing.assert_array_equal(obs[2:], second)


def test_the_end_of_a_rollout_keeps_its_action(task: Task, tiny_client: Client) -> None:
    obs = walk(task, tiny_client, [NEUTRAL, FILLER])
    assert relabeled(task, obs, [NEUTRAL, FILLER]) == [NEUTRAL, FILLER]


def test_an_operator_that_worked_at_another_attempt_stays_used(task: Task, tiny_client: Client) -> None:
    taken = [NEUTRAL, ASK, SUBMIT]
    obs = walk(task, tiny_client, taken)
    failed = np.concatenate([obs[:1], obs])  # a call that failed left everything as it was
    relabeled(task, failed, [NEUTRAL, *taken])
    used = task.observer.slices["used"].start + NEUTRAL
    assert failed[-1, 0, used] == obs[-1, 0, used] == 1


def test_a_teacher_s_form_is_imitated(tiny_task: Callable[..., Task], tiny_client: Client) -> None:
    class Learner:
        """Keeps what it should imitate."""

        def learn_from(self, teacher: object, *, rollouts: int, relabel: Relabel | None) -> None:
            self.relabel = relabel

    task = tiny_task(ask="form", max_episode_steps=STEPS, forms=forms.select("statement"))
    form, submit = len(task.operators), len(task.actions) - 1
    learner: Any = Learner()
    teach(learner, Plan(steps=("statement",)), task, TrainConfig(ask="form"))
    obs, actions = walk(task, tiny_client, [form, submit]), np.array([[form], [submit]])
    learner.relabel(obs, actions, actions == submit)
    assert actions.ravel().tolist() == [form, submit]
    assert obs[1, 0, task.observer.slices["used"].start + form] == 1
