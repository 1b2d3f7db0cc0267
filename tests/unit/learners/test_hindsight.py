"""Demonstrations in hindsight equal those of an episode without the rewrites that changed nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from query_mutator.env.task import Task
from query_mutator.learners.hindsight import relabel
from query_mutator.llm.client import Client
from query_mutator.operators import LocalOperator, OperatorContext
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
    return replace(tiny_task(ask="policy", max_episode_steps=STEPS, skip_unchanged=False), operators=tuple(operators))


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
