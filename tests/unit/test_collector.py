"""Collector: in whatever order steps come back, every environment's end up once each, one after another."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from ppo.algorithm import PPO
from ppo.config import PPOConfig
from query_mutator.env.one_cpu import OneCpu
from query_mutator.training.collector import Collector
from rl_query_mutator_env import BatchedQueryMutationEnv

NUM_ENVS, NUM_STEPS = 5, 4


class Shuffled:
    """Environments that show how many steps they have taken, and come back in groups at random."""

    num_envs = NUM_ENVS
    single_observation_space = SimpleNamespace(shape=(1,))

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.steps = np.full(NUM_ENVS, -1)
        self.busy: set[int] = set()

    def on_one_cpu(self) -> OneCpu:
        return OneCpu(lambda: ())

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
        infos = {"env_id": ready, "reset": self.steps[ready] == 0, "valid": ~none}
        return obs, self.steps[ready].astype(np.float64), none, none, infos


@pytest.mark.parametrize("max_policy_lag", [0, 1, 2])
@pytest.mark.parametrize("seed", range(5))
def test_every_step_is_in_one_rollout_and_once(seed: int, max_policy_lag: int) -> None:
    ppo = PPO(1, 3, PPOConfig(num_processes=NUM_ENVS, num_steps=NUM_STEPS, num_mini_batch=1))
    heard: list[int] = []
    collector = Collector(
        cast(BatchedQueryMutationEnv, Shuffled(seed)),
        ppo,
        None,
        seed=1,
        num_steps=NUM_STEPS,
        on_steps=lambda infos, ended, valid: heard.extend(infos["env_id"].tolist()),
        max_policy_lag=max_policy_lag,
    )
    for rollout in range(6):
        done = collector.collect()
        first = rollout * NUM_STEPS
        expected = np.tile(np.arange(first, first + NUM_STEPS)[:, None], NUM_ENVS)
        np.testing.assert_array_equal(done.buffer.obs[:, :, 0].numpy(), expected)
        np.testing.assert_array_equal(done.buffer.rewards.numpy(), expected + 1)
        np.testing.assert_array_equal(done.next_obs[:, 0], first + NUM_STEPS)
        assert 0 <= done.policy_lag <= max_policy_lag
        ppo.update(done.buffer, done.next_obs, stale=max_policy_lag > 0)
    assert min(np.bincount(heard)) >= 6 * NUM_STEPS


def test_a_rollout_is_looked_at_as_it_goes_and_let_go_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    for name in ("__enter__", "look", "__exit__"):
        monkeypatch.setattr(OneCpu, name, lambda *_, name=name: seen.append(name))
    ppo = PPO(1, 3, PPOConfig(num_processes=NUM_ENVS, num_steps=NUM_STEPS, num_mini_batch=1))
    envs = cast(BatchedQueryMutationEnv, Shuffled(0))
    Collector(envs, ppo, None, seed=1, num_steps=NUM_STEPS, on_steps=lambda infos, ended, valid: None).collect()
    assert (seen[0], seen[-1], set(seen[1:-1])) == ("__enter__", "__exit__", {"look"})
