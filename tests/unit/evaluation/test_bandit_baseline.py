"""The bandit of the result table learns returns from the transitions of a training."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from query_mutator.env.steps import Steps
from query_mutator.env.task import Task
from query_mutator.evaluation.bandit_baseline import RIDGE, BanditBaseline, fitted_bandit
from query_mutator.learners.returns import with_intercept
from query_mutator.types import ASK

MakeTask = Callable[..., Task]
Row = tuple[int, int, float, bool]  # environment, action, reward, last of its episode


@pytest.fixture
def task(tiny_task: MakeTask) -> Task:
    return tiny_task(ask="form")


def steps(task: Task, rows: Sequence[Row], *, seed: int = 0, invalid: Sequence[int] = ()) -> Steps:
    """Return steps whose observations are random where nothing is masked."""
    count, size = len(rows), task.observer.size
    obs = np.random.default_rng(seed).normal(size=(count, size)).astype(np.float32)
    obs[:, task.observer.slices["closed"]] = 0.0
    envs, actions, rewards, ended = (np.array(column) for column in zip(*rows, strict=True))
    never = np.zeros(count, dtype=np.bool_)
    valid = ~never
    valid[list(invalid)] = False
    return Steps(
        env_ids=envs, obs=obs, actions=actions, rewards=rewards, next_obs=obs, terminations=ended, truncations=never,
        valid=valid, versions=np.zeros(count, dtype=np.int64), calls=np.zeros(count, dtype=np.int64),
    )  # fmt: skip


def test_the_value_of_an_action_is_the_ridge_regression_of_returns(task: Task) -> None:
    baseline = BanditBaseline(task)
    rows = [(0, 1, -0.5, False), (1, 1, 0.25, True), (0, 1, 1.0, True), (1, 2, 7.0, False)]  # the last does not end
    seen = steps(task, rows)
    for place in range(len(rows)):  # one at a time: episodes are put together by environment
        baseline.observe(Steps(**{name: getattr(seen, name)[[place]] for name in Steps.__annotations__}))
    baseline.flush()
    bandit = baseline.fit()
    assert bandit is not None
    contexts, returns = with_intercept(seen.obs[:3]), np.array([0.5, 0.25, 1.0])
    theta = np.linalg.solve(contexts.T @ contexts + RIDGE * np.eye(contexts.shape[1]), contexts.T @ returns)
    values = bandit.values(seen.obs)
    assert values[:, 1] == pytest.approx(with_intercept(seen.obs) @ theta)
    assert not values[:, [0, 2]].any()  # never tried in an episode that ended


def test_a_rewrite_pays_by_what_follows(task: Task) -> None:
    """Each rewrite costs its price and is followed by an answer; asking at once gets less."""
    rewrite, ask = 0, task.actions.index(ASK)
    rows: list[Row] = []
    for _ in range(50):
        rows += [(0, rewrite, -0.01, False), (0, ask, 0.9, True), (0, ask, 0.3, True)]
    seen = steps(task, rows)
    seen.obs[:, 0], seen.obs[1::3, 0] = 0.0, 9.0  # only a rewritten question looks like this
    baseline = BanditBaseline(task)
    baseline.observe(seen)
    baseline.flush()
    bandit = baseline.fit()
    assert bandit is not None
    assert bandit.act(np.zeros((1, task.observer.size), dtype=np.float32), greedy=True).actions.tolist() == [rewrite]


def test_invalid_steps_teach_nothing_and_no_episode_is_no_bandit(task: Task) -> None:
    baseline = BanditBaseline(task)
    baseline.observe(steps(task, [(0, 1, 1.0, False)]))
    baseline.flush()
    assert baseline.fit() is None
    baseline.observe(steps(task, [(1, 2, 1.0, True)], invalid=[0]))
    baseline.flush()
    assert baseline.fit() is None


def test_sums_do_not_depend_on_the_order_in_which_steps_finish(task: Task) -> None:
    found = []
    seen = steps(task, [(env, env % 3, 0.1 * env, True) for env in range(7)])
    for order in (range(7), (3, 1, 0, 6, 5, 2, 4)):
        baseline = BanditBaseline(task)
        baseline.observe(Steps(**{name: getattr(seen, name)[list(order)] for name in Steps.__annotations__}))
        baseline.flush()
        found.append(baseline.state_dict())
    assert all(np.array_equal(found[0][name], found[1][name]) for name in ("outer", "return"))


def test_a_restored_state_continues_in_the_middle_of_an_episode(task: Task) -> None:
    whole, parts = BanditBaseline(task), BanditBaseline(task)
    first, second = steps(task, [(0, 1, 0.5, False)]), steps(task, [(0, 2, 1.0, True)], seed=1)
    for baseline in (whole, parts):
        baseline.observe(first)
        baseline.flush()
    restored, fresh = BanditBaseline(task), BanditBaseline(task)
    restored.load_state_dict(parts.state_dict())
    fresh.load_state_dict(parts.state_dict(), new_episodes=True)
    for baseline in (whole, restored, fresh):
        baseline.observe(second)
        baseline.flush()
    one, other, less = (baseline.state_dict() for baseline in (whole, restored, fresh))
    assert all(np.array_equal(one[name], other[name]) for name in ("outer", "return"))
    assert not np.array_equal(one["return"], less["return"])
    again = fitted_bandit(one, task)
    assert again is not None
    assert np.array_equal(again.values(second.obs), whole.fit().values(second.obs))  # type: ignore[union-attr]
    assert fitted_bandit(None, task) is None
