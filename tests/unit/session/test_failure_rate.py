"""The window that stops a run, and what invalid steps do to the loss."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ppo.algorithm import PPO
from ppo.config import PPOConfig
from ppo.gae import compute_gae
from ppo.rollout import RolloutBuffer
from query_mutator.errors import TooManyFailuresError
from query_mutator.session.play import FailureWindow

STEPS, ENVS, OBS_DIM, ACTIONS = 6, 3, 4, 5


def test_stops_above_the_rate_once_the_window_is_full() -> None:
    window = FailureWindow(0.2, size=10, why=lambda: ", most often 'busy'")
    window.add(np.array([True] * 7 + [False] * 2))  # 2 of 9
    window.add(np.array([True]))  # 2 of 10: not above
    with pytest.raises(TooManyFailuresError, match=r"3 of the last 10 steps, most often 'busy'.*--max-failure-rate"):
        window.add(np.array([False]))


def test_old_failures_leave_the_window() -> None:
    window = FailureWindow(0.5, size=4)
    for valid in [False, False, True, True, True, True, False, False]:
        window.add(np.array([valid]))


def filled(valid: np.ndarray, seed: int) -> RolloutBuffer:
    """Return a full buffer of one-step episodes, so that a step's advantage depends on it alone."""
    rng = np.random.default_rng(seed)
    buffer = RolloutBuffer(STEPS, ENVS, OBS_DIM)
    for step in range(STEPS):
        buffer.add(
            obs=rng.normal(size=(ENVS, OBS_DIM)),
            actions=rng.integers(ACTIONS, size=ENVS),
            logprobs=np.full(ENVS, -np.log(ACTIONS)),
            values=rng.normal(size=ENVS),
            rewards=np.where(valid[step], rng.normal(size=ENVS), 1e6),  # what must not be learned from
            terminations=np.ones(ENVS, dtype=bool),
            truncations=np.zeros(ENVS, dtype=bool),
            valid=valid[step],
        )
    return buffer


def test_loss_is_that_of_the_valid_steps_alone() -> None:
    valid = np.random.default_rng(5).random((STEPS, ENVS)) < 0.5
    kept = int(valid.sum())
    config = PPOConfig(num_processes=ENVS, num_steps=STEPS, num_mini_batch=1, ppo_epoch=2)
    ours = PPO(OBS_DIM, ACTIONS, config)
    whole = filled(valid, seed=9)
    stats = ours.update(whole, np.zeros((ENVS, OBS_DIM), dtype=np.float32))

    # The same steps in a buffer of their own, one environment, nothing left out.
    subset = RolloutBuffer(kept, 1, OBS_DIM)
    chosen = torch.from_numpy(valid)
    for name in ("obs", "actions", "logprobs", "values", "rewards"):
        getattr(subset, name)[:, 0] = getattr(whole, name)[chosen]
    subset.terminations[:] = True
    alone = PPO(OBS_DIM, ACTIONS, PPOConfig(num_processes=1, num_steps=kept, num_mini_batch=1, ppo_epoch=2))
    expected = alone.update(subset, np.zeros((1, OBS_DIM), dtype=np.float32))

    for key in ("losses/policy_loss", "losses/value_loss", "losses/entropy", "losses/grad_norm"):
        assert stats[key] == pytest.approx(expected[key], rel=1e-4), key
    advantages, _ = compute_gae(
        *(whole.rewards, whole.values, whole.terminations, whole.truncations, whole.final_values),
        *(torch.zeros(ENVS), whole.valid),
        gamma=0.9,
        gae_lambda=0.9,
    )
    assert (advantages[~chosen] == 0).all()
