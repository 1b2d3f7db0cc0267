"""gymnasium's ways to make and to wrap environments: all give the data of single environments on the same seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.wrappers import vector as wrappers

from query_mutator.testing import StubServer
from rl_query_mutator_env import make_env
from tests.integration.conftest import ROWS
from tests.tiny_lm import write_rows

ID = "rl_query_mutator_env:QueryMutation-v0"
SAME_STEP, NEXT_STEP, DISABLED = AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED
NUM_ENVS, NUM_ACTIONS = 3, 5
Envs = VectorEnv[Any, Any, Any]


@pytest.fixture(scope="module")
def settings(tiny_server: StubServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("gymnasium") / "questions.jsonl"
    write_rows(path, [{"id": f"q{n}", "query": text, "accept": [name]} for n, (text, name) in enumerate(ROWS)])
    return {
        "ollama_url": tiny_server.url, "target_model": "librarian", "mutator_model": "softener", "encoder": "hash",
        "dataset": str(path), "operators": "spelling,neutral,filler",
    }  # fmt: skip


@pytest.fixture(scope="module")
def both(settings: dict[str, Any]) -> Iterator[Callable[[AutoresetMode], tuple[Envs, Envs]]]:
    """Ours, and gymnasium's SyncVectorEnv of plain single environments; made once for each mode."""
    made: dict[AutoresetMode, tuple[Envs, Envs]] = {}

    def make(mode: AutoresetMode) -> tuple[Envs, Envs]:
        if mode not in made:
            ours = gym.make_vec(ID, num_envs=NUM_ENVS, autoreset_mode=mode, **settings)
            theirs = SyncVectorEnv([partial(make_env, **settings)] * NUM_ENVS, autoreset_mode=mode)
            made[mode] = ours, theirs
        return made[mode]

    yield make
    for pair in made.values():
        for envs in pair:
            envs.close()


def play(envs: Envs, *, seed: int = 7, steps: int = 15) -> list[Any]:
    """Return all that a seeded sequence of actions gives; where nothing resets, ended environments are reset."""
    rng, found = np.random.default_rng(seed), [envs.reset(seed=seed)]
    for _ in range(steps):
        found.append(envs.step(rng.integers(NUM_ACTIONS, size=NUM_ENVS)))  # type: ignore[arg-type]
        ended = np.logical_or(found[-1][2], found[-1][3])  # type: ignore[misc]
        if envs.metadata["autoreset_mode"] is DISABLED and ended.any():
            found.append(envs.reset(options={"reset_mask": ended}))
    return found


def assert_same(one: Any, other: Any) -> None:
    """Compare nested results to the bit; how long an episode took ("t") differs."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one.keys() - {"t"}:
            assert_same(one[key], other[key])
    elif isinstance(one, (list, tuple)) or (isinstance(one, np.ndarray) and one.dtype == object):
        for left, right in zip(one, other, strict=True):
            assert_same(left, right)
    else:
        assert np.array_equal(one, other)


@pytest.mark.parametrize("error", [ValueError, TypeError])  # the latter is what torchrl's GymEnv expects
def test_an_unknown_keyword_names_the_nearest_one(error: type[Exception]) -> None:
    for make in (gym.make, partial(gym.make_vec, num_envs=2)):
        with pytest.raises(error, match=r"unexpected keyword argument 'encodr', did you mean 'encoder'\?; known: "):
            make(ID, encodr="hash")


@pytest.mark.parametrize("kind", ["sync", pytest.param("async", marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", [SAME_STEP, NEXT_STEP])
def test_make_vec_of_singles_equals_our_vector_environment(
    kind: str, mode: AutoresetMode, settings: dict[str, Any]
) -> None:
    kwargs = {"autoreset_mode": mode}
    if kind == "async":
        kwargs["context"] = "forkserver"  # a fork of this process, which has threads, may hang
    theirs = gym.make_vec(ID, num_envs=NUM_ENVS, vectorization_mode=kind, vector_kwargs=kwargs, **settings)
    ours = gym.make_vec(ID, num_envs=NUM_ENVS, vectorization_mode="vector_entry_point", autoreset_mode=mode, **settings)
    found = play(ours)
    assert_same(found, play(theirs))
    assert sum(int((step[2] | step[3]).sum()) for step in found[1:]) > 3
    for envs in (ours, theirs):
        envs.close()


WRAPPERS: dict[str, tuple[AutoresetMode, Callable[[Envs], Envs]]] = {
    "RecordEpisodeStatistics": (SAME_STEP, wrappers.RecordEpisodeStatistics),
    "RecordEpisodeStatistics, next step": (NEXT_STEP, wrappers.RecordEpisodeStatistics),
    "DictInfoToList": (SAME_STEP, lambda envs: wrappers.DictInfoToList(wrappers.RecordEpisodeStatistics(envs))),
    "ClipReward": (SAME_STEP, lambda envs: wrappers.ClipReward(envs, -0.01, 0.01)),
    "NormalizeReward": (SAME_STEP, wrappers.NormalizeReward),
    "TransformReward": (SAME_STEP, lambda envs: wrappers.TransformReward(envs, lambda rewards: 2 * rewards)),
    "TransformAction": (SAME_STEP, lambda envs: wrappers.TransformAction(envs, lambda actions: (actions + 1) % 5)),
    "NormalizeObservation": (NEXT_STEP, wrappers.NormalizeObservation),
    "FlattenObservation, disabled": (DISABLED, wrappers.FlattenObservation),
    "FlattenObservation": (NEXT_STEP, wrappers.FlattenObservation),
    "DtypeObservation": (NEXT_STEP, lambda envs: wrappers.DtypeObservation(envs, np.float64)),
    "TransformObservation": (NEXT_STEP, lambda envs: wrappers.TransformObservation(envs, lambda obs: obs[:, :4])),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_vector_wrappers_over_ours_equal_those_over_singles(
    name: str, both: Callable[[AutoresetMode], tuple[Envs, Envs]]
) -> None:
    mode, wrap = WRAPPERS[name]
    ours, theirs = both(mode)
    assert_same(play(wrap(ours)), play(wrap(theirs)))


def test_episode_statistics_without_autoreset_are_those_of_the_environment(
    both: Callable[[AutoresetMode], tuple[Envs, Envs]],
) -> None:
    ended = 0
    for step in play(wrappers.RecordEpisodeStatistics(both(DISABLED)[0]))[1:]:
        if len(step) == 5 and "episode" in step[4]:
            rows = step[2] | step[3]
            assert step[4]["episode"]["l"][rows].tolist() == step[4]["episode_length"][rows].tolist()
            assert np.allclose(step[4]["episode"]["r"][rows], step[4]["episode_return"][rows])
            ended += int(rows.sum())
    assert ended > 3


@pytest.mark.parametrize("wrapper", [wrappers.NormalizeObservation, wrappers.FlattenObservation])
def test_observation_wrappers_reject_the_mode_in_which_they_would_leave_final_obs_as_it_is(
    wrapper: Any, both: Callable[[AutoresetMode], tuple[Envs, Envs]]
) -> None:
    with pytest.raises((AssertionError, ValueError), match=r"autoreset_mode"):
        wrapper(both(SAME_STEP)[0])
