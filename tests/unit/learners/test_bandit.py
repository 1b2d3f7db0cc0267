"""LinUCB: estimates of a ridge regression, bonus where little is known, masked actions, going on from a state."""

from __future__ import annotations

import numpy as np
import pytest

from query_mutator.env.steps import Steps
from query_mutator.learners.bandit import Bandit, BanditConfig, FrozenBandit, with_intercept

OBS_DIM, NUM_ENVS = 3, 2
CONFIG = BanditConfig(num_processes=NUM_ENVS, ucb_alpha=0.5)


def steps(obs: np.ndarray, actions: np.ndarray, rewards: np.ndarray, *, valid: bool = True) -> Steps:
    n = len(actions)
    ended = np.ones(n, dtype=np.bool_)
    return Steps(np.arange(n), obs, actions, rewards, obs, ended, ~ended, np.full(n, valid), np.zeros(n, dtype=int))


def taught(count: int, *, mask_columns: slice | None = None) -> tuple[Bandit, np.ndarray, np.ndarray, np.ndarray]:
    """Return a bandit that saw `count` random steps, and those: action 0 pays obs[0], action 1 pays 0.2."""
    rng = np.random.default_rng(0)
    bandit = Bandit(OBS_DIM, 2, CONFIG, mask_columns=mask_columns)
    obs = rng.normal(size=(count, OBS_DIM)).astype(np.float32)
    actions = rng.integers(2, size=count)
    rewards = np.where(actions == 0, obs[:, 0], 0.2)
    for row in range(0, count, NUM_ENVS):
        here = slice(row, row + NUM_ENVS)
        bandit.observe(steps(obs[here], actions[here], rewards[here]))
    return bandit, obs, actions, rewards


def test_estimates_are_those_of_ridge_regression() -> None:
    bandit, obs, actions, rewards = taught(40)
    for action in (0, 1):
        rows = with_intercept(obs[actions == action])
        theta = np.linalg.solve(np.eye(OBS_DIM + 1) + rows.T @ rows, rows.T @ rewards[actions == action])
        np.testing.assert_allclose(bandit.frozen.values(obs)[:, action], with_intercept(obs) @ theta, atol=1e-6)


def test_it_takes_what_pays_most() -> None:
    bandit, *_ = taught(400)
    obs = np.array([[1.0, 0, 0], [-1.0, 0, 0]], dtype=np.float32)
    assert bandit.frozen.act(obs, greedy=True).actions.tolist() == [0, 1]


def test_what_is_unknown_is_tried_first() -> None:
    bandit = Bandit(OBS_DIM, 3, CONFIG)
    obs = np.ones((NUM_ENVS, OBS_DIM), dtype=np.float32)
    for _ in range(5):
        bandit.observe(steps(obs, np.array([0, 1]), np.zeros(NUM_ENVS)))
    assert bandit.act(obs, [0, 1]).tolist() == [2, 2]


def test_masked_actions_are_never_taken() -> None:
    bandit = Bandit(OBS_DIM, 2, CONFIG, mask_columns=slice(1, 3))
    obs = np.array([[5.0, 1.0, 0.0]], dtype=np.float32)
    assert {int(bandit.act(obs, [0])[0]) for _ in range(20)} == {1}


def test_failed_steps_teach_nothing() -> None:
    bandit, obs, *_ = taught(40)
    before = bandit.frozen.values(obs)
    bandit.observe(steps(obs[:2], np.array([0, 1]), np.array([100.0, 100.0]), valid=False))
    np.testing.assert_array_equal(bandit.frozen.values(obs), before)
    assert (bandit.env_steps, bandit.samples_learned) == (42, 40)


def test_it_goes_on_from_its_state() -> None:
    first, obs, *_ = taught(40)
    second = Bandit(OBS_DIM, 2, CONFIG)
    second.load_state_dict(first.state_dict())
    np.testing.assert_allclose(second.frozen.values(obs, ucb_alpha=0.5), first.frozen.values(obs, ucb_alpha=0.5))
    assert second.act(obs[:2], [0, 1]).tolist() == first.act(obs[:2], [0, 1]).tolist()
    again = FrozenBandit(first.state_dict()["policy"])
    np.testing.assert_allclose(again.values(obs), first.frozen.values(obs))


def test_a_state_of_other_sizes_is_refused() -> None:
    with pytest.raises(ValueError, match="other observations or actions"):
        Bandit(OBS_DIM, 3, CONFIG).load_state_dict(Bandit(OBS_DIM, 2, CONFIG).state_dict())
    state = Bandit(OBS_DIM, 2, CONFIG).state_dict()
    state["rng"]["actions"] = state["rng"]["actions"][1:]
    with pytest.raises(ValueError, match="try num_processes="):
        Bandit(OBS_DIM, 2, CONFIG).load_state_dict(state)
