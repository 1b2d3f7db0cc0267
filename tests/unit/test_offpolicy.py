"""Rounds of an off-policy run: shares of the collectors, what reaches the learner, who waits for whom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from query_mutator.env.task import Task
from query_mutator.iqn.steps import FloatArray, Steps
from query_mutator.llm.client import Client
from query_mutator.training.off_policy import EnvGroups, OffPolicyRounds
from rl_query_mutator_env import QueryMutationEnv

MakeEnvs = Callable[..., EnvGroups]
NUM_STEPS = 6


class Clerk:
    """A learner that writes down what it is given, acts at random, and owes a gradient step for every `every` steps."""

    def __init__(self, num_actions: int, *, every: int = 1) -> None:
        self.num_actions, self.every = num_actions, every
        self.version = self.updates_done = self.learned = self.most_owed = 0
        self.seen: list[Steps] = []
        self.hand_overs = 0

    @property
    def count(self) -> int:
        return sum(len(steps.env_ids) for steps in self.seen)

    @property
    def updates_owed(self) -> int:
        owed = self.count // self.every - self.learned
        self.most_owed = max(self.most_owed, owed)
        return owed

    def act(self, obs: FloatArray, env_ids: Sequence[int]) -> NDArray[np.int64]:
        return np.array([int(np.flatnonzero(row[-self.num_actions :] < 0.5)[0]) for row in obs])

    def observe(self, steps: Steps) -> None:
        self.seen.append(steps)

    def learn(self) -> None:
        self.learned += 1

    def hand_over(self) -> None:
        self.hand_overs += 1

    def forget_pending(self) -> None:
        self.seen.clear()

    def stats(self) -> dict[str, float]:
        return {"rl/avg_value": 0.0}


@pytest.fixture
def make_envs(tiny_task: Callable[..., Task], tiny_client: Client) -> Iterator[MakeEnvs]:
    made: list[EnvGroups] = []

    def make(count: int, num_groups: int) -> EnvGroups:
        task = tiny_task(max_episode_steps=4)
        envs = [QueryMutationEnv(task, client=tiny_client, env_id=env) for env in range(count)]
        made.append(EnvGroups(envs, 8, num_groups=num_groups))
        return made[-1]

    yield make
    for groups in made:
        groups.close()


def rounds_of(groups: EnvGroups, clerk: Clerk, **settings: Any) -> OffPolicyRounds:
    return OffPolicyRounds(
        groups.groups, clerk, None, seed=1, num_steps=NUM_STEPS, on_steps=lambda *told: None, **settings
    )


@pytest.mark.parametrize(("count", "num_groups"), [(16, 8), (7, 3), (5, 5), (4, 1)])
def test_collectors_share_environments_evenly(count: int, num_groups: int, make_envs: MakeEnvs) -> None:
    sizes = [group.num_envs for group in make_envs(count, num_groups).groups]
    assert (len(sizes), sum(sizes)) == (num_groups, count)
    assert max(sizes) - min(sizes) <= 1


def test_every_environment_takes_its_steps_and_the_chain_is_whole(make_envs: MakeEnvs) -> None:
    groups = make_envs(5, 2)
    clerk = Clerk(len(groups.envs[0].task.actions))
    rounds = rounds_of(groups, clerk)
    for _ in range(2):
        rounds.collect()
        rounds.update()
    rounds.close()
    assert Counter(env for steps in clerk.seen for env in steps.env_ids.tolist()) == dict.fromkeys(
        range(5), 2 * NUM_STEPS
    )
    for env in range(5):
        rows = [
            (steps.obs[row], steps.next_obs[row], steps.terminations[row] | steps.truncations[row])
            for steps in clerk.seen
            for row in np.flatnonzero(steps.env_ids == env)
        ]
        for (_, led_to, ended), (seen, _, _) in pairwise(rows):
            assert ended or (led_to == seen).all()
        assert sum(ended for *_, ended in rows) == 2 * NUM_STEPS // 4


def test_all_that_is_owed_is_paid_by_the_end_of_a_round(make_envs: MakeEnvs) -> None:
    groups = make_envs(4, 2)
    clerk = Clerk(len(groups.envs[0].task.actions), every=3)
    rounds = rounds_of(groups, clerk)
    rounds.collect()
    shares = rounds.update()
    rounds.close()
    assert clerk.learned == 4 * NUM_STEPS // 3
    assert (clerk.updates_done, clerk.hand_overs) == (1, 1)
    assert 0 <= shares["perf/learner_share_training"] + shares["perf/learner_share_waiting"] <= 1


def test_a_debt_is_paid_before_more_is_taken_in(make_envs: MakeEnvs) -> None:
    groups = make_envs(4, 4)
    clerk = Clerk(len(groups.envs[0].task.actions))
    rounds = rounds_of(groups, clerk, max_update_debt=0)
    rounds.collect()
    rounds.close()
    assert clerk.most_owed <= max(len(steps.env_ids) for steps in clerk.seen)


def test_what_a_collector_raises_comes_out(make_envs: MakeEnvs) -> None:
    groups = make_envs(4, 2)
    clerk = Clerk(len(groups.envs[0].task.actions))
    rounds = rounds_of(groups, clerk)
    clerk.act = lambda obs, env_ids: np.full(len(obs), 99)  # type: ignore[method-assign]
    with pytest.raises(IndexError):
        rounds.collect()
    rounds.close()


def test_states_go_round_by_environment_whatever_the_groups(make_envs: MakeEnvs) -> None:
    first = make_envs(5, 2)
    clerk = Clerk(len(first.envs[0].task.actions))
    rounds = rounds_of(first, clerk)
    rounds.collect()
    rounds.close()
    second = make_envs(5, 3)
    obs = second.load_state_dict(first.state_dict())
    assert obs is not None
    assert obs.shape == (5, len(clerk.seen[0].obs[0]))
    assert [env.total_steps for env in second.envs] == [NUM_STEPS] * 5
