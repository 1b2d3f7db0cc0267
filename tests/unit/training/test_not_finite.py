"""Numbers of an environment that are not finite reach no learner."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from ppo.config import PPOConfig
from query_mutator.errors import EXIT_USAGE, UsageError
from query_mutator.learners.ppo import PPOLearner
from query_mutator.training.loop import AsyncVectorEnv, OnPolicyLoop

FIELDS = {"observation": 0, "reward": 1}


class Lockstep:
    """Two environments, numbers 4 and 5 of a run; one of their numbers in step 11 is not finite."""

    num_envs = 2
    single_observation_space = SimpleNamespace(shape=(1,))

    def __init__(self, what: str) -> None:
        self.what, self.steps = what, -1

    def send_reset(self, *, seed: int) -> None: ...

    def send(self, actions: Any, env_ids: Any) -> None: ...

    def step_ids(self, env_ids: Any) -> list[tuple[int, int]]:
        return [(4 + int(env), self.steps) for env in env_ids]

    def recv(self, max_envs: int) -> tuple[Any, ...]:
        self.steps += 1
        found: tuple[Any, ...] = (np.zeros((2, 1), dtype=np.float32), np.zeros(2))
        none, last = np.zeros(2, dtype=np.bool_), np.zeros((2, 1), dtype=np.float32)
        bad = last if self.what == "last observation" else found[FIELDS[self.what]]
        if self.steps == 11:
            bad[1] = math.nan
        final_obs = np.empty(2, dtype=object)
        final_obs[:] = list(last)
        reset = np.full(2, self.steps == 0)
        infos = {"env_id": np.arange(2), "reset": reset, "valid": ~none, "step_calls": np.zeros(2, dtype=np.int64)}
        return (*found, none, ~reset, {**infos, "final_obs": final_obs})


@pytest.mark.parametrize("what", [*FIELDS, "last observation"])
def test_training_stops_before_a_number_that_is_not_finite_reaches_the_weights(what: str) -> None:
    config = PPOConfig(num_processes=2, num_steps=4, num_mini_batch=1)
    learner = PPOLearner(1, 3, config, mask_columns=None)
    envs = cast(AsyncVectorEnv, Lockstep(what))
    loop = OnPolicyLoop(envs, learner, None, seed=1, num_steps=4, on_steps=lambda infos, steps: None)
    for _ in range(2):
        loop.collect()
        loop.update()
    with pytest.raises(UsageError, match=f"environment 5, step 11: the {what} has the value nan; correct") as caught:
        loop.collect()
    assert caught.value.exit_code == EXIT_USAGE
    assert all(weight.isfinite().all() for weight in learner.state_dict()["policy"].values())
