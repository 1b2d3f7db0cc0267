"""The on-policy loop with PPO: in whatever order steps finish, each is in one rollout, once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from ppo.config import PPOConfig
from query_mutator.learners.ppo import PPOLearner
from query_mutator.training.loop import AsyncVectorEnv, OnPolicyLoop

NUM_ENVS, NUM_STEPS = 5, 4


class Shuffled:
    """Environments that show how many steps they have taken, and come back in groups at random."""

    num_envs = NUM_ENVS
    single_observation_space = SimpleNamespace(shape=(1,))

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.steps = np.full(NUM_ENVS, -1)
        self.busy: set[int] = set()

    def send_reset(self, *, seed: int) -> None:
        self.busy = set(range(NUM_ENVS))

    def send(self, actions: NDArray[np.int64], env_ids: NDArray[np.int64]) -> None:
        assert self.busy.isdisjoint(env_ids.tolist())
        self.busy.update(env_ids.tolist())

    def recv(self, max_envs: int) -> tuple[Any, ...]:
        waiting = self.rng.permutation(sorted(self.busy))
        ready = waiting[: self.rng.integers(1, len(waiting), endpoint=True)]
        self.busy -= set(ready.tolist())
        self.steps[ready] += 1
        none = np.zeros(len(ready), dtype=np.bool_)
        obs = self.steps[ready][:, None].astype(np.float32)
        infos = {
            "env_id": ready,
            "reset": self.steps[ready] == 0,
            "valid": ~none,
            "step_calls": np.zeros(len(ready), dtype=np.int64),
        }
        return obs, self.steps[ready].astype(np.float64), none, none, infos


@pytest.mark.parametrize("seed", range(5))
def test_every_step_is_in_one_rollout_and_once(seed: int) -> None:
    config = PPOConfig(num_processes=NUM_ENVS, num_steps=NUM_STEPS, num_mini_batch=1)
    learner = PPOLearner(1, 3, config, mask_columns=None)
    reported: list[int] = []
    loop = OnPolicyLoop(
        cast(AsyncVectorEnv, Shuffled(seed)),
        learner,
        None,
        seed=1,
        num_steps=NUM_STEPS,
        on_steps=lambda infos, steps: reported.extend(infos["env_id"].tolist()),
    )
    for number in range(6):
        loop.collect()
        first = number * NUM_STEPS
        expected = np.tile(np.arange(first, first + NUM_STEPS)[:, None], NUM_ENVS)
        np.testing.assert_array_equal(learner._buffer.obs[:, :, 0].numpy(), expected)
        np.testing.assert_array_equal(learner._buffer.rewards.numpy(), expected + 1)
        np.testing.assert_array_equal(learner._next_obs[:, 0], first + NUM_STEPS)
        loop.update()
    assert np.bincount(reported).tolist() == [6 * NUM_STEPS] * NUM_ENVS
