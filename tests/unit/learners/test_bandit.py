"""The bandit: a regression of returns, bonus where little is known, masked actions, going on from a state."""

from __future__ import annotations

import numpy as np
import pytest

from query_mutator.env.steps import Steps
from query_mutator.learners.bandit import Bandit, BanditConfig, FrozenBandit, hierarchical_ridge
from query_mutator.learners.plan import PlanPolicy

OBS_DIM, NUM_ENVS = 3, 2
CONFIG = BanditConfig(num_processes=NUM_ENVS, ucb_alpha=0.5)


def steps(obs: np.ndarray, actions: np.ndarray, rewards: np.ndarray, *, valid: bool = True) -> Steps:
    n = len(actions)
    ended = np.ones(n, dtype=np.bool_)
    return Steps(
        np.arange(n), obs, actions, rewards, obs, ended, ~ended, np.full(n, valid), *np.zeros((2, n), dtype=int)
    )


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


def test_coefficients_are_those_of_one_regression_with_shared_and_own_parts() -> None:
    rng, shared, own = np.random.default_rng(0), 2.0, 3.0
    contexts = [rng.normal(size=(5 + action, 4)) for action in range(3)]
    returns = [rng.normal(size=len(rows)) for rows in contexts]
    theta, covariance = hierarchical_ridge(
        np.array([rows.T @ rows for rows in contexts]),
        np.array([rows.T @ values for rows, values in zip(contexts, returns, strict=True)]),
        shared=shared,
        own=own,
    )
    parts = [
        [rows if place in (0, action + 1) else 0 * rows for place in range(4)] for action, rows in enumerate(contexts)
    ]
    design = np.block(parts)
    inverse = np.linalg.inv(design.T @ design + np.diag([shared] * 4 + [own] * 12))
    coefficients = inverse @ design.T @ np.concatenate(returns)
    for action in range(3):
        sums = np.zeros((4, 16))
        sums[:, :4] = sums[:, 4 * (action + 1) : 4 * (action + 2)] = np.eye(4)
        np.testing.assert_allclose(theta[action], sums @ coefficients)
        np.testing.assert_allclose(covariance[action], sums @ inverse @ sums.T)


def test_a_step_pays_what_its_episode_brings() -> None:
    """Action 0 brings nothing itself, and 1 at the end of its episode; action 1 alone brings 0.4."""
    bandit = Bandit(OBS_DIM, 3, CONFIG)
    obs, none = np.zeros((1, OBS_DIM), dtype=np.float32), np.zeros(1, dtype=np.bool_)
    for _ in range(40):
        for action, reward, ends in ((0, 0.0, False), (2, 1.0, True), (1, 0.4, True)):
            bandit.observe(
                Steps(
                    np.zeros(1, int),
                    obs,
                    np.array([action]),
                    np.array([reward]),
                    obs,
                    none | ends,
                    none,
                    ~none,
                    none,
                    none,
                )
            )
    bandit.update()
    assert bandit.frozen.act(obs, greedy=True).actions.tolist() == [0]
    assert bandit.frozen.values(obs)[0] == pytest.approx([1.0, 0.4, 1.0], abs=0.15)


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


def always_second() -> PlanPolicy:
    """Return a plan for observations [gain, used 2, closed 2] that takes action 1."""
    whole = {"items": [1], "used": [1, 2], "closed": [3, 4], "fit": 0, "asked": 0}
    return PlanPolicy({name: np.array(value, dtype=np.int64) for name, value in whole.items()} | {"stop": np.nan})


def taught_by_a_plan(*, lcb_alpha: float, rollouts: int = 0) -> Bandit:
    """Return a bandit that saw action 0 pay the gain, up to 1, and action 1 the half of 1."""
    config = BanditConfig(num_processes=1, lcb_alpha=lcb_alpha, ridge=1.0, own_ridge=1.0)
    bandit, rng = Bandit(5, 2, config, mask_columns=slice(3, 5)), np.random.default_rng(0)
    bandit.learn_from(always_second(), rollouts=rollouts)
    for number in range(60):
        obs = np.array([[rng.uniform(), 0, 0, 0, 0]], dtype=np.float32)
        bandit.observe(steps(obs, np.array([number % 2]), np.array([0.5 if number % 2 else obs[0, 0]])))
    return bandit


def test_a_teacher_is_left_only_for_what_is_surely_better() -> None:
    obs = np.array([[0.6, 0, 0, 0, 0], [1.0, 0, 0, 0, 0], [0.1, 0, 0, 0, 0]], dtype=np.float32)
    assert taught_by_a_plan(lcb_alpha=0.0).frozen.act(obs, greedy=True).actions.tolist() == [0, 0, 1]
    bandit = taught_by_a_plan(lcb_alpha=0.5)
    assert bandit.frozen.act(obs, greedy=True).actions.tolist() == [1, 0, 1]
    assert taught_by_a_plan(lcb_alpha=5.0).frozen.act(obs, greedy=True).actions.tolist() == [1, 1, 1]
    loaded = FrozenBandit(bandit.state_dict()["policy"])
    assert loaded.act(obs, greedy=True).actions.tolist() == [1, 0, 1]
    closed = np.array([[0.6, 0, 0, 0, 1], [1.0, 0, 0, 1, 0]], dtype=np.float32)  # each way, one action is masked
    assert bandit.frozen.act(closed, greedy=True).actions.tolist()[1] == 1


def test_a_teacher_takes_the_first_rollouts() -> None:
    bandit = taught_by_a_plan(lcb_alpha=0.5, rollouts=1)
    obs = np.array([[1.0, 0, 0, 0, 0]], dtype=np.float32)
    assert bandit.act(obs, [0]).tolist() == [1]
    bandit.update()
    assert bandit.act(obs, [0]).tolist() == [0]


def test_a_state_of_other_sizes_is_refused() -> None:
    with pytest.raises(ValueError, match="other observations or actions"):
        Bandit(OBS_DIM, 3, CONFIG).load_state_dict(Bandit(OBS_DIM, 2, CONFIG).state_dict())
    state = Bandit(OBS_DIM, 2, CONFIG).state_dict()
    state["rng"]["actions"] = state["rng"]["actions"][1:]
    with pytest.raises(ValueError, match="try num_processes="):
        Bandit(OBS_DIM, 2, CONFIG).load_state_dict(state)
