"""Sums of returns: whole episodes alone, in an order that timing does not change, and going on from a state."""

from __future__ import annotations

import numpy as np

from query_mutator.env.steps import Steps
from query_mutator.learners.returns import ReturnSums

OBS_DIM, NUM_ACTIONS, NUM_ENVS = 3, 2, 4


def step(env: int, *, ends: bool) -> Steps:
    """Return a step of one environment; an environment's steps are always the same."""
    rng = np.random.default_rng(env)
    obs = rng.normal(size=(1, OBS_DIM)).astype(np.float32)
    ended = np.array([ends])
    return Steps(
        np.array([env]),
        obs,
        np.array([0]),
        rng.normal(size=1) * 10.0**env,
        obs,
        ended,
        ~ended & False,
        np.array([True]),
        *np.zeros((2, 1), dtype=int),
    )


def summed(order: list[int]) -> ReturnSums:
    sums = ReturnSums(NUM_ACTIONS, OBS_DIM)
    for env in order:
        sums.observe(step(env, ends=True))
    sums.flush()
    return sums


def test_sums_are_the_same_to_the_bit_whichever_environment_ended_first() -> None:
    first, second = summed([0, 1, 2, 3]), summed([3, 1, 0, 2])
    assert (first.outer == second.outer).all()
    assert (first.returns == second.returns).all()


def test_an_episode_counts_when_it_has_ended_unless_its_environment_is_reset() -> None:
    first = ReturnSums(NUM_ACTIONS, OBS_DIM)
    first.observe(step(0, ends=False))
    first.flush()
    state = first.state_dict()
    goes_on, begins_anew = ReturnSums(NUM_ACTIONS, OBS_DIM), ReturnSums(NUM_ACTIONS, OBS_DIM)
    goes_on.load_state_dict(state)
    begins_anew.load_state_dict(state, new_episodes=True)
    for sums in (first, goes_on, begins_anew):
        assert sums.steps == 0
        sums.observe(step(0, ends=True))
        sums.flush()
    assert (first.steps, goes_on.steps, begins_anew.steps) == (2, 2, 1)
    assert (goes_on.returns == first.returns).all()
    assert not (begins_anew.returns == first.returns).all()
