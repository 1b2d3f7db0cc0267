"""Stable-Baselines3's VecEnv over gymnasium's VectorEnv, on CartPole and on ours, and its learners over it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import TimeLimit
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from stable_baselines3 import PPO
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv

from query_mutator.adapters.sb3 import GymVecEnv
from query_mutator.env.task import Task
from query_mutator.llm.client import Client
from rl_query_mutator_env import BatchedQueryMutationEnv, QueryMutationEnv


def assert_same(one: Any, other: Any) -> None:
    """Compare nested infos; what one library has as a number, the other may have as an array of no dimension."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    else:
        assert np.array_equal(one, other, equal_nan=np.asarray(one).dtype.kind == "f")


# --- steps -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_our_environment_equals_sb3s_own_vec_env_of_singles(
    questions: Any, tiny_task: MakeTask, tiny_client: Client
) -> None:
    task = tiny_task()
    theirs: Any = DummyVecEnv([lambda: QueryMutationEnv(task, client=tiny_client)] * 5)
    for envs in (questions, theirs):
        envs.seed(11)
    assert np.array_equal(questions.reset(), theirs.reset())
    rng = np.random.default_rng(0)
    for _ in range(12):
        actions = rng.integers(5, size=5)
        (obs, rewards, dones, infos), expected = questions.step(actions), theirs.step(actions)
        for one, other in zip((obs, rewards, dones), expected, strict=False):
            assert np.array_equal(one, other)
        for info, other in zip(infos, expected[3], strict=True):
            assert_same(info, other)
        for info, other in zip(questions.reset_infos, theirs.reset_infos, strict=True):
            assert_same(info, other)


@pytest.mark.slow
def test_last_step_of_an_episode_has_its_observation_and_says_whether_it_was_truncated(carts: Any) -> None:
    carts.seed(1)
    first = carts.reset()
    for _ in range(MAX_STEPS):
        obs, _, dones, infos = carts.step(np.array([0, 1, 0]))
    assert dones.all()
    for index, info in enumerate(infos):
        assert info["TimeLimit.truncated"] is True
        assert not np.array_equal(info["terminal_observation"], obs[index])
        assert np.abs(obs[index]).max() <= 0.05  # of a reset
    assert not np.array_equal(first, obs)
    assert all("terminal_observation" not in info for info in carts.step(np.array([0, 1, 0]))[3])


@pytest.mark.slow
def test_observations_are_not_overwritten_by_the_next_step() -> None:
    envs: Any = GymVecEnv(SyncVectorEnv([cart_pole] * 2, autoreset_mode=SAME_STEP, copy=False))
    first = envs.reset()
    kept = np.array(first)
    envs.step(np.array([0, 1]))
    assert np.array_equal(first, kept)
    envs.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: SyncVectorEnv([cart_pole], autoreset_mode=AutoresetMode.NEXT_STEP), "NEXT_STEP.* must be SAME_STEP"),
        (lambda: SyncVectorEnv([cart_pole], autoreset_mode=AutoresetMode.DISABLED), "DISABLED.* must be SAME_STEP"),
        (lambda: cart_pole(), "for a Recorded use a VecEnv of SB3"),
        (lambda: AsyncVectorEnv([cart_pole], autoreset_mode=SAME_STEP), "for a AsyncVectorEnv use a VecEnv of SB3"),
    ],
)
def test_other_autoreset_modes_and_what_holds_no_environments_are_errors(make: Callable[[], Any], said: str) -> None:
    envs = make()
    with pytest.raises((TypeError, ValueError), match=said):
        GymVecEnv(envs)
    envs.close()


# --- seeds, options, rendering ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_seeds_and_options_are_used_once(carts: Any) -> None:
    assert carts.seed(3) == [3, 4, 5]
    carts.set_options({"low": -0.01, "high": 0.01})
    first = carts.reset()
    assert np.abs(first).max() <= 0.01
    assert carts.get_attr("options") == [{"low": -0.01, "high": 0.01}] * NUM_ENVS
    assert np.abs(carts.reset()).max() > 0.01
    assert carts.get_attr("options") == [None] * NUM_ENVS
    carts.seed(3)
    carts.set_options({"low": -0.01, "high": 0.01})
    assert np.array_equal(carts.reset(), first)

    carts.set_options([{}, {"low": -0.01}, {}])  # of single environments
    with pytest.raises(ValueError, match="same options for all environments"):
        carts.reset()


# --- single environments ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_attributes_methods_and_wrappers_are_those_of_sb3s_own(carts: Any) -> None:
    carts.reset()
    carts.set_attr("greeting", "goodbye", indices=[0, 2])
    assert carts.get_attr("greeting") == ["goodbye", "hello", "goodbye"]
    assert carts.env_method("add", 1, other=2, indices=[1]) == [3]
    assert carts.env_is_wrapped(TimeLimit) == [True] * NUM_ENVS
    assert carts.env_is_wrapped(Monitor) == [False] * NUM_ENVS


def test_episode_statistics_of_gymnasiums_wrapper_reach_sb3s_logger() -> None:
    envs = GymVecEnv(RecordEpisodeStatistics(SyncVectorEnv([cart_pole] * 2, autoreset_mode=SAME_STEP)))
    model = PPO("MlpPolicy", envs, n_steps=16, batch_size=16, n_epochs=1, device="cpu").learn(32)
    assert model.ep_info_buffer is not None
    assert [episode["l"] for episode in model.ep_info_buffer] == [MAX_STEPS] * 4
    assert [episode["r"] for episode in model.ep_info_buffer] == [MAX_STEPS] * 4
    envs.close()


MakeTask = Callable[..., Task]
SAME_STEP = AutoresetMode.SAME_STEP
NUM_ENVS = 3
MAX_STEPS = 7


class Recorded(gym.Wrapper[Any, Any, Any, Any]):
    """Keeps the options of the last reset; its picture is black, and needs no pygame."""

    greeting = "hello"

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self.options: dict[str, Any] | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.options = options
        return self.env.reset(seed=seed, options=options)

    def render(self) -> Any:
        return np.zeros((4, 6, 3), np.uint8)

    def add(self, one: int, *, other: int) -> int:
        return one + other


def cart_pole() -> gym.Env[Any, Any]:
    return Recorded(TimeLimit(gym.make("CartPole-v1", render_mode="rgb_array").unwrapped, MAX_STEPS))


@pytest.fixture
def carts() -> Iterator[GymVecEnv]:
    envs = GymVecEnv(SyncVectorEnv([cart_pole] * NUM_ENVS, autoreset_mode=SAME_STEP))
    yield envs
    envs.close()


@pytest.fixture
def questions(tiny_task: MakeTask, tiny_client: Client) -> Iterator[GymVecEnv]:
    task = tiny_task()
    singles = [QueryMutationEnv(task, client=tiny_client, env_id=i) for i in range(5)]
    envs = GymVecEnv(BatchedQueryMutationEnv(singles))
    yield envs
    envs.close()
