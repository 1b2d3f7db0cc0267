"""Fitted Q iteration: what it learns from steps, how prices enter, its state; PPO as a learner."""

from __future__ import annotations

import numpy as np
import pytest

from ppo.config import PPOConfig
from query_mutator.env.episode import PRICE_SCALE
from query_mutator.learners.direct import DirectMethod, FrozenValues
from query_mutator.learners.learner import PPOLearner, Steps
from query_mutator.settings import DirectConfig

# Columns: what decides which action pays, whether there is an answer, three of the mask, the price.
DECIDES, ANSWERED, MASK, PRICE, SIZE = 0, 1, slice(2, 5), 5, 6
LEFT, RIGHT, SUBMIT = range(3)
ENVS = 8
NUM_ENVS, NUM_STEPS, OBS = 3, 2, 2


def learner(**settings: object) -> DirectMethod:
    return DirectMethod(SIZE, 3, DirectConfig(num_processes=ENVS, **settings), mask_columns=MASK)  # type: ignore[arg-type]


def play(direct: DirectMethod, rounds: int, *, price: float, seed: int = 0) -> None:
    """Ask once, the side that pays 1, the other 0.2, and submit; submitting at once pays nothing."""
    rng = np.random.default_rng(seed)
    ids = np.arange(ENVS)
    for _ in range(rounds):
        obs = np.zeros((ENVS, SIZE), dtype=np.float32)
        obs[:, DECIDES], obs[:, PRICE] = rng.choice([-1, 1], ENVS), PRICE_SCALE * price
        for _ in range(2):
            actions = direct.act(obs, ids.tolist())
            assert not obs[ids, MASK.start + actions].any()
            asks = actions != SUBMIT
            pays = np.where((actions == RIGHT) == (obs[:, DECIDES] > 0), 1.0, 0.2)
            last = obs.copy()
            last[asks, ANSWERED] = last[asks, MASK.start] = last[asks, MASK.start + 1] = 1
            rewards = np.where(asks, pays - price, 0.0)
            none = np.zeros(ENVS, dtype=np.bool_)
            versions = np.zeros(ENVS, dtype=np.int64)
            direct.observe(Steps(ids, obs, actions, rewards, last, ~asks, none, ~none, versions, asks.astype(np.int64)))
            obs = last


def chosen(direct: DirectMethod, side: float, *, price: float, answered: bool = False) -> int:
    obs = np.array([[side, answered, answered, answered, 0, PRICE_SCALE * price]], dtype=np.float32)
    return int(direct.frozen.act(obs, greedy=True).actions[0])


@pytest.mark.parametrize("most_rows", [500, 10**6])  # a sample of the steps, or all of them
def test_it_takes_what_pays_and_submits_where_nothing_more_does(
    most_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("query_mutator.learners.direct.MOST_ROWS", most_rows)
    direct = learner()
    assert direct.frozen.act(np.zeros((2, SIZE), np.float32)).actions.tolist() == [LEFT, LEFT]  # the first allowed
    play(direct, 60, price=0.05)
    assert direct.update()["rl/avg_value"] > 0
    assert (chosen(direct, -1, price=0.05), chosen(direct, 1, price=0.05)) == (LEFT, RIGHT)
    assert chosen(direct, 1, price=0.05, answered=True) == SUBMIT
    assert direct.frozen.values(np.zeros((4, SIZE), np.float32)).shape == (4, 4, 3)


def test_environments_act_by_models_of_other_episodes_and_never_take_what_is_masked() -> None:
    direct = learner()
    play(direct, 60, price=0.05)
    direct.update()
    values = direct.frozen.values(np.zeros((1, SIZE), np.float32))[:, 0]
    assert len(np.unique(values[:, LEFT])) == direct.config.num_models
    masked = np.zeros((1, SIZE), np.float32)
    masked[0, MASK.start : MASK.start + 2] = 1
    assert direct.frozen.values(masked)[0, 0, :2].tolist() == [-np.inf, -np.inf]
    stored = direct.state_dict()["optimizer"]["steps"]
    asked = stored["actions"] != SUBMIT
    assert set(np.round(stored["gains"][asked].tolist(), 6)) == {0.2, 1.0}  # without the price


def test_one_fit_holds_for_prices_that_no_step_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("query_mutator.learners.direct.PRICES", (0.05, 2.0))
    direct = learner()
    play(direct, 120, price=0.05)
    direct.update()
    assert chosen(direct, 1, price=0.05) == RIGHT
    assert chosen(direct, 1, price=2.0) == SUBMIT  # a right answer is worth 1


def test_it_is_fitted_again_when_there_are_a_fifth_more_steps() -> None:
    direct = learner()
    play(direct, 40, price=0.05)
    direct.update()
    fits = direct.gradient_steps
    play(direct, 4, price=0.05)
    assert direct.update() == {}
    play(direct, 10, price=0.05)
    assert direct.update() == {}  # while the next calls are made
    assert direct.gradient_steps == fits == 4 + direct.config.num_models
    assert direct.update()["rl/avg_value"] > 0
    assert direct.gradient_steps == 2 * fits


def test_the_last_fit_of_a_run_is_waited_for() -> None:
    direct = learner(num_env_steps=2 * 2 * 40 * ENVS)
    for _ in range(2):
        play(direct, 40, price=0.05)
        assert direct.update()["rl/avg_value"] > 0
    assert direct.gradient_steps == 2 * (4 + direct.config.num_models)


def test_a_failed_step_is_left_out() -> None:
    direct = learner()
    obs, none = np.zeros((ENVS, SIZE), np.float32), np.zeros(ENVS, dtype=np.bool_)
    zeros = np.zeros(ENVS, dtype=np.int64)
    direct.observe(Steps(np.arange(ENVS), obs, zeros, np.ones(ENVS), obs, none, ~none, none, zeros, zeros))
    assert direct.update() == {}
    assert direct.state_dict()["optimizer"]["steps"]["actions"].size == 0


def test_a_restored_learner_goes_on_as_the_saved_one() -> None:
    direct, other = learner(), learner()
    play(direct, 40, price=0.05)
    direct.update()
    other.load_state_dict(direct.state_dict())
    for one in (direct, other):
        play(one, 40, price=0.05, seed=1)
        one.update()
    ours, theirs = direct.state_dict(), other.state_dict()
    assert ours["policy"].keys() == theirs["policy"].keys()
    assert all((ours["policy"][name] == theirs["policy"][name]).all() for name in ours["policy"])
    assert ours["counts"] == theirs["counts"]
    again = learner()
    again.load_state_dict(direct.state_dict())
    again.update()
    assert again.update() == {}  # no step is new


def test_arrays_of_something_else_are_refused() -> None:
    direct = learner()
    play(direct, 40, price=0.05)
    direct.update()
    state = dict(direct.frozen.state)
    short, beyond = {"0/value": state["0/value"][:-1]}, {"0/column": state["0/column"] + 99}
    for odd in ({}, state | short, state | beyond, state | {"masked": np.array([1, 2, 99])}):
        with pytest.raises(ValueError, match="trees of a direct method"):
            FrozenValues(odd)
    wider = DirectMethod(SIZE + 1, 3, DirectConfig(num_processes=ENVS), mask_columns=MASK)
    with pytest.raises(ValueError, match="other observations or actions"):
        wider.load_state_dict(direct.state_dict())


def learner_and_steps() -> tuple[PPOLearner, Steps]:
    """Return a learner after its first choice, and the steps that came of it: the second invalid, the third cut."""
    config = PPOConfig(num_processes=NUM_ENVS, num_steps=NUM_STEPS, num_mini_batch=1)
    learner = PPOLearner(OBS, 4, config, mask_columns=None)
    rng = np.random.default_rng(0)
    obs, next_obs = rng.normal(size=(2, NUM_ENVS, OBS)).astype(np.float32)
    steps = Steps(
        env_ids=np.arange(NUM_ENVS),
        obs=obs,
        actions=learner.act(obs, range(NUM_ENVS)),
        rewards=np.array([0.5, 0.0, -0.25]),
        next_obs=next_obs,
        terminations=np.zeros(NUM_ENVS, dtype=np.bool_),
        truncations=np.array([False, False, True]),
        valid=np.array([True, False, True]),
        versions=np.zeros(NUM_ENVS, dtype=np.int64),
        calls=np.zeros(NUM_ENVS, dtype=np.int64),
    )
    return learner, steps


def test_an_invalid_step_is_stored_as_such_and_a_truncated_one_with_the_value_of_its_last_observation() -> None:
    learner, steps = learner_and_steps()
    learner.observe(steps)
    buffer = learner._buffer
    assert buffer.valid[0].tolist() == [True, False, True]
    assert buffer.rewards[0].tolist() == [0.5, 0.0, -0.25]
    values = learner.frozen.get_value(steps.next_obs)
    np.testing.assert_allclose(buffer.final_values[0].numpy(), [0.0, 0.0, values[2]], rtol=1e-5)


def test_an_action_from_the_journal_gets_its_own_log_probability() -> None:
    learner, steps = learner_and_steps()
    other = (steps.actions + 1) % 4
    learner.observe(steps._replace(actions=other))
    expected = learner.frozen.logprobs(steps.obs, other)
    np.testing.assert_allclose(learner._buffer.logprobs[0].numpy(), expected, rtol=1e-5)
