"""Policy and its frozen copy, rollouts over gymnasium vectors, and checkpoints that say what is wrong with them."""

from __future__ import annotations

import errno
import os
import pickle
import random
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ppo.algorithm import PPO
from ppo.checkpoint import load_checkpoint, save_checkpoint
from ppo.collect import RolloutCollector, first_episode_returns
from ppo.config import PPOConfig
from ppo.frozen import ActOutput, FrozenPolicy
from ppo.policy import Policy
from ppo.rollout import RolloutBuffer

OBS_DIM, NUM_ACTIONS = 7, 5


def a_policy(seed: int = 3) -> Policy:
    """Return a policy whose actor prefers some actions, as one that has learned does."""
    policy = Policy(OBS_DIM, NUM_ACTIONS, (32, 16), seed=seed)
    with torch.no_grad():
        policy.actor_head.weight.mul_(100)
    return policy


def observations(rows: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(size=(rows, OBS_DIM)).astype(np.float32)


def streams(rows: int) -> list[np.random.Generator]:
    return [np.random.default_rng(i) for i in range(rows)]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 16, 33])
def test_the_frozen_policy_gives_torchs_numbers(rows: int, deterministic: bool) -> None:
    policy, obs = a_policy(), observations(rows)
    acted = policy.frozen(deterministic=deterministic).act(obs, streams(rows))
    logits, values = policy(torch.from_numpy(obs))
    chosen = torch.distributions.Categorical(logits=logits).log_prob(torch.from_numpy(acted.actions))
    np.testing.assert_allclose(acted.values, values.detach().numpy(), atol=1e-6)
    np.testing.assert_allclose(acted.logprobs, chosen.detach().numpy(), atol=2e-6)
    np.testing.assert_array_equal(policy.frozen(deterministic=deterministic).get_value(obs), acted.values)


def test_actions_come_as_often_as_they_are_likely() -> None:
    policy, obs = a_policy(), observations(1)
    rng = np.random.default_rng(0)
    draws = 20_000
    acted = policy.frozen().act(np.repeat(obs, draws, axis=0), [rng] * draws)
    shares = np.bincount(acted.actions, minlength=NUM_ACTIONS) / draws
    expected = policy(torch.from_numpy(obs))[0].softmax(-1)[0].detach().numpy()
    np.testing.assert_allclose(shares, expected, atol=0.02)
    assert 0.05 < expected.max() < 0.95


def test_certain_actions_are_never_missed() -> None:
    policy = a_policy()
    with torch.no_grad():
        policy.actor_head.bias.copy_(torch.tensor([-1e4, 1e4, -1e4, -1e4, -1e4]))
    acted = policy.frozen().act(observations(500), streams(500))
    assert (acted.actions == 1).all()
    assert (acted.logprobs == 0).all()


@settings(max_examples=15)
@given(st.permutations(range(11)), st.lists(st.integers(1, 4), min_size=11, max_size=11))
def test_deterministic_acting_does_not_depend_on_the_grouping(order: list[int], sizes: list[int]) -> None:
    frozen, obs = a_policy().frozen(deterministic=True), observations(11)
    together = frozen.act(obs, streams(11))
    rngs = streams(11)
    apart = ActOutput(np.zeros(11, np.int64), np.zeros(11, np.float32), np.zeros(11, np.float32))
    while order:
        group, order = order[: sizes[0]], order[sizes[0] :]
        sizes = sizes[1:]
        acted = frozen.act(obs[group], [rngs[i] for i in group])
        for whole, part in zip(apart, acted, strict=True):
            whole[group] = part
        np.testing.assert_array_equal(frozen.get_value(obs[group]), acted.values)
    for one, other in zip(together, apart, strict=True):
        assert one.tobytes() == other.tobytes()


def test_a_frozen_policy_stays_as_it_was() -> None:
    policy, obs = a_policy(), observations(3)
    frozen = policy.frozen()
    before = frozen.get_value(obs)
    with torch.no_grad():
        policy.critic_head.bias.add_(1)
    np.testing.assert_array_equal(frozen.get_value(obs), before)
    np.testing.assert_allclose(policy.frozen().get_value(obs), before + 1, atol=1e-6)


@pytest.mark.parametrize("state", [{}, {"a": torch.zeros(2)}, {"hidden.0.weight": 3}])
def test_other_contents_are_not_taken_for_a_policy(state: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="not the weights of an actor-critic"):
        FrozenPolicy(state)


@pytest.mark.parametrize("deterministic", [False, True])
def test_masked_actions_are_not_taken(deterministic: bool) -> None:
    policy = Policy(OBS_DIM, NUM_ACTIONS, (32, 16), seed=3, mask_columns=slice(2, 7))
    obs = observations(400)
    obs[:, 2:] = np.random.default_rng(1).random((400, NUM_ACTIONS)) < 0.6
    obs[:, 2] = 0  # one stays open
    acted = policy.frozen(deterministic=deterministic).act(obs, streams(400))
    assert not obs[np.arange(400), 2 + acted.actions].any()
    logits, _ = policy(torch.from_numpy(obs))
    chosen = logits.log_softmax(-1).gather(1, torch.from_numpy(acted.actions)[:, None]).squeeze(1)
    np.testing.assert_allclose(acted.logprobs, chosen.detach().numpy(), atol=1e-5)


def test_masked_columns_are_saved_with_the_weights_and_as_many_as_actions() -> None:
    policy = Policy(OBS_DIM, NUM_ACTIONS, (32, 16), seed=3, mask_columns=slice(2, 7))
    again = Policy(OBS_DIM, NUM_ACTIONS, (32, 16), mask_columns=slice(0, 5))
    again.load_state_dict(policy.state_dict())
    assert again.closed.tolist() == [2, 3, 4, 5, 6]
    with pytest.raises(ValueError, match="4 mask columns for 5 actions"):
        Policy(OBS_DIM, NUM_ACTIONS, mask_columns=slice(3, 7))


class Counter(gym.Env[Any, Any]):
    """Shows (episode, step); ends after `length` steps, every second episode by truncation; a step pays its number."""

    action_space = gym.spaces.Discrete(3)
    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float64)

    def __init__(self, length: int) -> None:
        self.length, self.episode, self.count = length, -1, 0
        self.shown = np.zeros(2)

    def _show(self) -> np.ndarray[Any, Any]:
        self.shown[:] = self.episode, self.count  # the same array every time
        return self.shown

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.episode, self.count = self.episode + 1, 0
        return self._show().copy(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.count += 1
        ended, cut = self.count == self.length, self.episode % 2 == 1
        return self._show().copy(), float(self.count), ended and not cut, ended and cut, {}


def counters(mode: AutoresetMode, *lengths: int, copy: bool = True) -> SyncVectorEnv:
    return SyncVectorEnv([lambda n=n: Counter(n) for n in lengths], autoreset_mode=mode, copy=copy)


def an_agent(num_envs: int) -> PPO:
    return PPO(2, 3, PPOConfig(num_processes=num_envs, num_mini_batch=1))


@pytest.mark.parametrize("copy", [True, False])
def test_same_step_rollouts_waste_no_step(copy: bool) -> None:
    ppo, buffer = an_agent(1), RolloutBuffer(7, 1, 2)
    collector = RolloutCollector(counters(AutoresetMode.SAME_STEP, 3, copy=copy))
    returns = collector.collect(ppo, buffer)
    assert buffer.obs[:, 0].tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2], [2, 0]]
    assert buffer.rewards[:, 0].tolist() == [1, 2, 3, 1, 2, 3, 1]
    assert buffer.terminations[:, 0].nonzero().flatten().tolist() == [2]
    assert buffer.truncations[:, 0].nonzero().flatten().tolist() == [5]
    # The value of where the second episode was cut, (1, 3), not of the third's beginning.
    cut = ppo.get_value(np.array([[1, 3]], dtype=np.float32))[0]
    assert buffer.final_values[:, 0].tolist() == [0, 0, 0, 0, 0, cut, 0]
    assert buffer.valid.all()
    assert collector.obs.tolist() == [[2, 1]]
    assert returns == [6.0, 6.0]


def test_episodes_run_on_from_one_rollout_to_the_next() -> None:
    ppo, buffer = an_agent(2), RolloutBuffer(2, 2, 2)
    collector = RolloutCollector(counters(AutoresetMode.SAME_STEP, 3, 5))
    ended = []
    for _ in range(3):
        ended.append(collector.collect(ppo, buffer))
        buffer.reset()
    assert ended == [[], [6.0], [15.0, 6.0]]


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED])
def test_environments_that_do_not_reset_in_the_last_step_are_refused(mode: AutoresetMode) -> None:
    with pytest.raises(ValueError, match=r"make it with autoreset_mode=AutoresetMode.SAME_STEP"):
        RolloutCollector(counters(mode, 3))


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP])
def test_evaluation_takes_one_episode_of_each_environment(mode: AutoresetMode) -> None:
    frozen = an_agent(1).frozen
    assert first_episode_returns(frozen, counters(mode, 2, 5, 3)).tolist() == [3, 15, 6]


def test_a_checkpoint_loads_with_weights_only_and_holds_the_state_dict(tmp_path: Path) -> None:
    ppo = PPO(4, 2, PPOConfig())
    path = save_checkpoint(tmp_path / "new" / "step_1.pt", {**ppo.state_dict(), "operators": ["a", "b"]})
    state = torch.load(path, weights_only=True)
    assert list(state["policy"]) == list(ppo.policy.state_dict())
    assert all(torch.equal(state["policy"][name], tensor) for name, tensor in ppo.policy.state_dict().items())
    assert state["operators"] == ["a", "b"]
    assert FrozenPolicy(load_checkpoint(path)["policy"]).num_actions == 2
    assert [file.name for file in path.parent.iterdir()] == ["step_1.pt"]


def test_a_failed_write_leaves_the_old_checkpoint_and_no_rubbish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_checkpoint(tmp_path / "step_1.pt", {"policy": {"w": torch.ones(2)}})

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        save_checkpoint(path, {"policy": {"w": torch.zeros(2)}})
    assert load_checkpoint(path)["policy"]["w"].tolist() == [1, 1]
    assert [file.name for file in tmp_path.iterdir()] == ["step_1.pt"]


class Opener:
    """Runs code when unpickled, as a hostile file would."""

    def __reduce__(self) -> tuple[object, ...]:
        return (os.mkdir, ("must_not_be_made",))


def test_a_file_that_would_run_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_checkpoint(tmp_path / "hostile.pt", {"policy": Opener()})
    with pytest.raises(ValueError, match="may run code") as raised:
        load_checkpoint(tmp_path / "hostile.pt")
    assert "weights_only" not in str(raised.value)  # PyTorch advises to load it after all
    assert not Path("must_not_be_made").exists()


@pytest.mark.parametrize("content", [None, b"", b"hello", b"PK\x03\x04cut short", pickle.dumps([1, 2], protocol=2)])
def test_anything_else_is_an_error_that_names_it(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "some.pt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=r"(no checkpoint at|cannot read).*some\.pt|some\.pt is not a checkpoint"):
        load_checkpoint(path)


def test_a_flipped_bit_is_found_and_another_dictionary_is_no_checkpoint(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "some.pt", {"policy": {"w": torch.arange(64.0)}, "updates_done": 3})
    content, rng = path.read_bytes(), random.Random(5)
    for _ in range(400):
        damaged = bytearray(content)
        damaged[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"some\.pt: its content does not match its digest"):
            load_checkpoint(path)
    with pytest.raises(ValueError, match="no entry 'policy'"):
        load_checkpoint(save_checkpoint(tmp_path / "other.pt", {"model": 1}))
