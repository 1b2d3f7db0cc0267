"""The loop: what reaches the learner, who waits for whom; the calls of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gymnasium.error import InvalidAction
from numpy.typing import NDArray

from ppo.config import PPOConfig
from query_mutator.env.task import Task
from query_mutator.learners.learner import BaseLearner, PPOLearner, Steps
from query_mutator.llm.client import Client
from query_mutator.training.loop import TrainingLoop
from query_mutator.types import FloatArray
from rl_query_mutator_env import BatchedQueryMutationEnv, QueryMutationEnv

MakeEnvs = Callable[[int], BatchedQueryMutationEnv]
NUM_STEPS = 6
NUM_ENVS, ROLLOUT_STEPS = 5, 4


class Recorder(BaseLearner):
    """Records its steps, takes the first allowed action, and has a gradient step pending for every `every` steps."""

    def __init__(self, num_actions: int, *, every: int = 1) -> None:
        self.num_actions, self.every = num_actions, every
        self.version = self.updates_done = self.learned = self.most_pending = 0
        self.seen: list[Steps] = []

    @property
    def count(self) -> int:
        return sum(len(steps.env_ids) for steps in self.seen)

    @property
    def pending_updates(self) -> int:
        pending = self.count // self.every - self.learned
        self.most_pending = max(self.most_pending, pending)
        return pending

    def act(self, obs: FloatArray, env_ids: Sequence[int]) -> NDArray[np.int64]:
        return np.array([int(np.flatnonzero(row[-self.num_actions :] < 0.5)[0]) for row in obs])

    def observe(self, steps: Steps) -> None:
        self.seen.append(steps)

    def learn(self) -> None:
        self.learned += 1

    def update(self) -> dict[str, float]:
        self.updates_done += 1
        return {"rl/avg_value": 0.0}


@pytest.fixture
def make_envs(tiny_task: Callable[..., Task], tiny_client: Client) -> Iterator[MakeEnvs]:
    made: list[BatchedQueryMutationEnv] = []

    def make(count: int) -> BatchedQueryMutationEnv:
        task = tiny_task(max_episode_steps=4)
        envs = [QueryMutationEnv(task, client=tiny_client, env_id=env) for env in range(count)]
        made.append(BatchedQueryMutationEnv(envs, min(8, count)))
        return made[-1]

    yield make
    for envs in made:
        envs.close()


def loop_of(envs: BatchedQueryMutationEnv, recorder: Recorder, **settings: Any) -> TrainingLoop:
    return TrainingLoop(envs, recorder, None, seed=1, num_steps=NUM_STEPS, on_steps=lambda *steps: None, **settings)


def test_every_environment_takes_its_steps_and_the_chain_is_whole(make_envs: MakeEnvs) -> None:
    envs = make_envs(5)
    recorder = Recorder(envs.single_action_space.n)
    loop = loop_of(envs, recorder)
    for _ in range(2):
        loop.collect()
        loop.update()
    assert Counter(env for steps in recorder.seen for env in steps.env_ids.tolist()) == dict.fromkeys(
        range(5), 2 * NUM_STEPS
    )
    for env in range(5):
        rows = [
            (steps.obs[row], steps.next_obs[row], steps.terminations[row] | steps.truncations[row])
            for steps in recorder.seen
            for row in np.flatnonzero(steps.env_ids == env)
        ]
        for (_, led_to, ended), (seen, _, _) in pairwise(rows):
            assert ended or (led_to == seen).all()
        assert sum(ended for *_, ended in rows) == 2 * NUM_STEPS // 4


def test_no_update_is_pending_at_the_end_of_a_rollout(make_envs: MakeEnvs) -> None:
    envs = make_envs(4)
    recorder = Recorder(envs.single_action_space.n, every=3)
    loop = loop_of(envs, recorder)
    loop.collect()
    shares = loop.update()
    assert recorder.learned == 4 * NUM_STEPS // 3
    assert (recorder.updates_done, shares["rl/avg_value"]) == (1, 0.0)
    assert 0 <= shares["perf/learner_share_training"] + shares["perf/learner_share_waiting"] <= 1


def test_pending_updates_come_before_more_steps(make_envs: MakeEnvs) -> None:
    envs = make_envs(4)
    recorder = Recorder(envs.single_action_space.n)
    loop = loop_of(envs, recorder, max_pending_updates=0)
    loop.collect()
    assert recorder.most_pending <= max(len(steps.env_ids) for steps in recorder.seen)


def test_errors_of_the_environments_are_raised(make_envs: MakeEnvs) -> None:
    envs = make_envs(4)
    recorder = Recorder(envs.single_action_space.n)
    loop = loop_of(envs, recorder)
    recorder.act = lambda obs, env_ids: np.full(len(obs), 99)  # type: ignore[method-assign]
    with pytest.raises(InvalidAction):
        loop.collect()


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

    def recv(self, max_envs: int, *, waits: bool) -> tuple[Any, ...]:
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
            "step_cost": np.zeros(len(ready)),
        }
        return obs, self.steps[ready].astype(np.float64), none, none, infos


@pytest.mark.parametrize("seed", range(5))
def test_every_step_is_in_one_rollout_and_once(seed: int) -> None:
    config = PPOConfig(num_processes=NUM_ENVS, num_steps=ROLLOUT_STEPS, num_mini_batch=1)
    learner = PPOLearner(1, 3, config, mask_columns=None)
    reported: list[int] = []
    loop = TrainingLoop(
        Shuffled(seed),
        learner,
        None,
        seed=1,
        num_steps=ROLLOUT_STEPS,
        on_steps=lambda infos, steps: reported.extend(infos["env_id"].tolist()),
    )
    for number in range(6):
        loop.collect()
        first = number * ROLLOUT_STEPS
        expected = np.tile(np.arange(first, first + ROLLOUT_STEPS)[:, None], NUM_ENVS)
        np.testing.assert_array_equal(learner._buffer.obs[:, :, 0].numpy(), expected)
        np.testing.assert_array_equal(learner._buffer.rewards.numpy(), expected + 1)
        np.testing.assert_array_equal(learner._next_obs[:, 0], first + ROLLOUT_STEPS)
        loop.update()
    assert np.bincount(reported).tolist() == [6 * ROLLOUT_STEPS] * NUM_ENVS
