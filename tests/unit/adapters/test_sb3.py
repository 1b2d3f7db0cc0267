"""Stable-Baselines3's VecEnv over gymnasium's VectorEnv: what SB3 expects of any VecEnv, on CartPole and on ours."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.wrappers import TimeLimit
from sb3_contrib import MaskablePPO
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv

from query_mutator.adapters.sb3 import GymVecEnv
from query_mutator.llm.client import Client
from rl_query_mutator_env import BatchedQueryMutationEnv, QueryMutationEnv
from tests.unit.adapters.carts import MAX_STEPS, NUM_ENVS, SAME_STEP, MakeTask, Recorded, Vector, cart_pole

pytestmark = pytest.mark.slow


def assert_same(one: Any, other: Any) -> None:
    """Compare nested infos; what one library has as a number, the other may have as an array of no dimension."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    else:
        assert np.array_equal(one, other, equal_nan=np.asarray(one).dtype.kind == "f")


# --- steps -----------------------------------------------------------------------------------------------------------


def test_every_step_equals_that_of_sb3s_own_vec_env(carts: Any) -> None:
    theirs: Any = DummyVecEnv([cart_pole] * NUM_ENVS)
    for envs in (carts, theirs):
        envs.seed(5)
    assert np.array_equal(carts.reset(), theirs.reset())
    rng, ended = np.random.default_rng(0), 0
    for _ in range(4 * MAX_STEPS):
        actions = rng.integers(2, size=NUM_ENVS)
        (obs, rewards, dones, infos), expected = carts.step(actions), theirs.step(actions)
        assert np.array_equal(obs, expected[0])
        assert np.array_equal(rewards, expected[1])
        assert rewards.dtype == np.float32
        assert np.array_equal(dones, expected[2])
        for info, other in zip(infos, expected[3], strict=True):
            assert_same(info, other)
        assert carts.reset_infos == theirs.reset_infos
        ended += int(dones.sum())
    assert ended >= 3 * NUM_ENVS


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
        assert np.array_equal(obs, expected[0])
        assert np.array_equal(rewards, expected[1])
        assert np.array_equal(dones, expected[2])
        for info, other in zip(infos, expected[3], strict=True):
            assert_same(info, other)
        for info, other in zip(questions.reset_infos, theirs.reset_infos, strict=True):
            assert_same(info, other)


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


def test_a_terminated_episode_is_not_truncated(vector: Vector) -> None:
    envs = GymVecEnv(vector([lambda: gym.make("CartPole-v1")] * 2, autoreset_mode=SAME_STEP))
    envs.reset()
    for _ in range(12):  # always to one side: the pole falls
        _, _, dones, infos = envs.step(np.array([1, 1]))
        if dones.any():
            break
    assert [info["TimeLimit.truncated"] for info, done in zip(infos, dones, strict=True) if done] == [
        False
    ] * dones.sum()
    assert dones.any()
    envs.close()


@pytest.mark.parametrize("space", ["dict", "tuple", "discrete"])
def test_observations_of_other_spaces(vector: Vector, space: str) -> None:
    envs = GymVecEnv(vector([lambda: Shapes(space)] * 2, autoreset_mode=SAME_STEP))
    theirs = DummyVecEnv([lambda: Shapes(space)] * 2)
    same = envs.reset(), theirs.reset()
    for _ in range(5):
        for one, other in (same, (same := (envs.step(np.zeros(2, int))[0], theirs.step(np.zeros(2, int))[0]))):
            np.testing.assert_equal(one, other)
    envs.close()


class Shapes(gym.Env[Any, Any]):
    """Counts steps in an observation of another space; an episode has three."""

    action_space = gym.spaces.Discrete(2)

    def __init__(self, space: str) -> None:
        box, few = gym.spaces.Box(0, 9, (2,), np.float32), gym.spaces.Discrete(10)
        spaces: dict[str, gym.Space[Any]] = {
            "dict": gym.spaces.Dict({"box": box, "few": few}),
            "tuple": gym.spaces.Tuple((box, few)),
            "discrete": few,
        }
        self.space, self.observation_space, self.count = space, spaces[space], 0

    def _obs(self) -> Any:
        box = np.full(2, self.count, np.float32)
        return {"dict": {"box": box, "few": self.count}, "tuple": (box, self.count), "discrete": self.count}[self.space]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.count = 0
        return self._obs(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.count += 1
        return self._obs(), 1.0, self.count == 3, False, {"count": self.count}


def test_observations_are_not_overwritten_by_the_next_step(vector: Vector) -> None:
    envs: Any = GymVecEnv(vector([cart_pole] * 2, autoreset_mode=SAME_STEP, copy=False))
    first = envs.reset()
    kept = np.array(first)
    envs.step(np.array([0, 1]))
    assert np.array_equal(first, kept)
    envs.close()


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED])
def test_other_autoreset_modes_are_an_error_that_says_what_to_do(mode: AutoresetMode) -> None:
    envs = SyncVectorEnv([cart_pole], autoreset_mode=mode)
    with pytest.raises(
        ValueError, match=f"autoreset mode {mode.name} must be SAME_STEP.*autoreset_mode=AutoresetMode.SAME_STEP"
    ):
        GymVecEnv(envs)
    with pytest.raises(TypeError, match="for a Recorded use DummyVecEnv"):
        GymVecEnv(cart_pole())  # type: ignore[arg-type]


# --- seeds, options, rendering ----------------------------------------------------------------------------------------


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


def test_options_of_single_environments_are_an_error(carts: Any) -> None:
    carts.set_options([{}, {"low": -0.01}, {}])
    with pytest.raises(ValueError, match="same options for all environments"):
        carts.reset()


def test_images_are_tiled(carts: Any) -> None:
    carts.reset()
    image = carts.render()
    assert image is not None
    assert image.shape == (8, 12, 3)
    assert [frame.shape for frame in carts.get_images() if frame is not None] == [(4, 6, 3)] * NUM_ENVS


def test_text_is_rendered_by_each_environment(tiny_task: MakeTask, tiny_client: Client) -> None:
    env = QueryMutationEnv(tiny_task(), client=tiny_client, render_mode="ansi")
    envs = GymVecEnv(BatchedQueryMutationEnv([env]))
    envs.reset()
    assert envs.render_mode == "ansi"
    assert envs.get_images() == [None]
    assert envs.env_method("render") == [env.render()]
    envs.close()


# --- single environments ---------------------------------------------------------------------------------------------


def test_attributes_and_methods(carts: Any) -> None:
    carts.reset()
    assert carts.has_attr("greeting")
    assert carts.has_attr("add")
    assert not carts.has_attr("farewell")
    with pytest.raises(AttributeError, match="farewell"):
        carts.get_attr("farewell")
    assert carts.get_attr("greeting") == ["hello"] * NUM_ENVS
    carts.set_attr("greeting", "goodbye", indices=[0, 2])
    assert carts.get_attr("greeting") == ["goodbye", "hello", "goodbye"]
    assert carts.get_attr("greeting", indices=1) == ["hello"]
    carts.set_attr("greeting", "hi")
    assert carts.get_attr("greeting", indices=[1, 2]) == ["hi"] * 2
    assert carts.env_method("add", 1, other=2) == [3] * NUM_ENVS
    carts.step(np.zeros(NUM_ENVS, dtype=int))  # the workers live


def test_a_method_of_some_environments(vector: Vector, carts: Any) -> None:
    if vector is SyncVectorEnv:
        assert carts.env_method("add", 1, other=2, indices=[0, 2]) == [3, 3]
    else:
        with pytest.raises(ValueError, match="AsyncVectorEnv has no access to single environments"):
            carts.env_method("add", 1, other=2, indices=[0, 2])


def test_wrappers_of_single_environments(vector: Vector, carts: Any) -> None:
    assert carts.env_is_wrapped(TimeLimit) == carts.env_is_wrapped(Recorded) == [True] * NUM_ENVS
    assert carts.env_is_wrapped(Monitor) == [False] * NUM_ENVS
    monitored = GymVecEnv(vector([lambda: Monitor(cart_pole()), cart_pole], autoreset_mode=SAME_STEP))
    assert monitored.env_is_wrapped(Monitor) == [True, False]
    assert monitored.env_is_wrapped(Monitor, indices=[1]) == [False]
    monitored.close()


class Vectorized(VectorEnv[Any, Any, Any]):
    """A VectorEnv without single environments; action 1 is never allowed."""

    metadata = {"autoreset_mode": SAME_STEP}  # noqa: RUF012 - as gymnasium has it
    num_envs = 2
    single_observation_space = gym.spaces.Box(0, 1, (1,), np.float32)
    single_action_space = gym.spaces.Discrete(2)
    speed = 3

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return np.zeros((2, 1), np.float32), {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        assert not np.any(actions)
        return np.zeros((2, 1), np.float32), np.ones(2), np.zeros(2, bool), np.zeros(2, bool), {}

    def action_masks(self) -> Any:
        return np.array([[True, False]] * 2)


def test_a_vector_environment_without_single_ones_lends_its_own_methods() -> None:
    envs = GymVecEnv(Vectorized())
    assert envs.get_attr("speed") == [3, 3]
    envs.set_attr("speed", 4)
    assert envs.get_attr("speed", indices=0) == [4]
    with pytest.raises(ValueError, match="without indices"):
        envs.set_attr("speed", 5, indices=[0])
    assert envs.env_is_wrapped(Monitor) == [False, False]
    MaskablePPO("MlpPolicy", envs, n_steps=8, batch_size=16, n_epochs=1, device="cpu").learn(16)
