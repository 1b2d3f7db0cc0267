"""n-step transitions with known numbers: returns, discounts, ends of episodes, failed steps."""

from __future__ import annotations

import numpy as np
import pytest

from query_mutator.learners.iqn.replay import NStep, Transition
from query_mutator.learners.learner import Steps


def obs(number: int) -> np.ndarray:
    return np.array([number], dtype=np.float32)


def one_step(env: int, i: int, reward: float, *, end: str = "", valid: bool = True) -> Steps:
    """Action i in one environment, which sees i and leads to i + 1."""
    return Steps(
        env_ids=np.array([env]),
        obs=obs(i)[None],
        actions=np.array([i]),
        rewards=np.array([reward]),
        next_obs=obs(i + 1)[None],
        terminations=np.array([end == "terminated"]),
        truncations=np.array([end == "truncated"]),
        valid=np.array([valid]),
        versions=np.array([0]),
        calls=np.array([0]),
    )


def steps(nstep: NStep, *rewards: float, end: str = "", failed: tuple[int, ...] = (), env: int = 0) -> list[Transition]:
    """Take a step for each reward, action i seeing i and leading to i + 1; `end` is how the last one ended."""
    done: list[Transition] = []
    for i, reward in enumerate(rewards):
        last = i == len(rewards) - 1
        done += nstep.add(one_step(env, i, reward, end=end if last else "", valid=i not in failed))
    return done


def rounded(transitions: list[Transition]) -> list[tuple[int, float, int, float]]:
    return [(int(t.obs[0]), round(t.n_return, 6), int(t.next_obs[0]), round(t.discount, 6)) for t in transitions]


def test_two_steps_are_summed_and_the_third_is_looked_up() -> None:
    assert rounded(steps(NStep(1, 2, 0.5), 1.0, 2.0, 4.0)) == [(0, 2.0, 2, 0.25), (1, 4.0, 3, 0.25)]


def test_a_terminated_episode_has_no_future() -> None:
    found = rounded(steps(NStep(1, 3, 0.5), 1.0, 2.0, end="terminated"))
    assert found == [(0, 2.0, 2, 0.0), (1, 2.0, 2, 0.0)]


def test_a_truncated_one_would_have_gone_on() -> None:
    found = rounded(steps(NStep(1, 3, 0.5), 1.0, 2.0, end="truncated"))
    assert found == [(0, 2.0, 2, 0.25), (1, 2.0, 2, 0.5)]


def test_the_next_episode_starts_without_pending_steps() -> None:
    nstep = NStep(1, 3, 0.5)
    steps(nstep, 1.0, end="terminated")
    assert rounded(steps(nstep, 5.0, 5.0, end="terminated")) == [(0, 7.5, 2, 0.0), (1, 5.0, 2, 0.0)]


def test_a_failed_step_is_skipped_as_if_it_had_not_happened() -> None:
    found = steps(NStep(1, 2, 0.5), 1.0, 99.0, 2.0, 4.0, failed=(1,))
    assert rounded(found) == [(0, 2.0, 3, 0.25), (2, 4.0, 4, 0.25)]
    assert [t.action for t in found] == [0, 2]


def test_an_episode_cut_off_at_a_failed_step_still_ends() -> None:
    assert rounded(steps(NStep(1, 3, 0.5), 1.0, 99.0, end="truncated", failed=(1,))) == [(0, 1.0, 2, 0.5)]


def test_environments_do_not_mix() -> None:
    nstep = NStep(2, 2, 0.5)
    assert steps(nstep, 1.0, env=0) == []
    assert steps(nstep, 7.0, env=1) == []
    assert rounded(nstep.add(one_step(0, 1, 2.0))) == [(0, 2.0, 2, 0.25)]


def test_it_resumes_from_its_state_and_can_forget() -> None:
    first, second = NStep(1, 3, 0.5), NStep(1, 3, 0.5)
    steps(first, 1.0, 2.0)
    second.load_state_dict(first.state_dict())
    (whole,) = second.add(one_step(0, 2, 4.0))
    assert whole.n_return == pytest.approx(1.0 + 1.0 + 1.0)
    first.forget()
    assert first.add(one_step(0, 2, 4.0)) == []
