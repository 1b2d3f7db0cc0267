"""RolloutCollector: what ends up in the buffer under each autoreset mode, and unbiased evaluation."""

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

from ppo.algorithm import PPO
from ppo.checkpoint import load_checkpoint, save_checkpoint
from ppo.collect import Episode, RolloutCollector, first_episode_returns
from ppo.config import PPOConfig
from ppo.gae import compute_gae
from ppo.policy import Policy
from ppo.rollout import RolloutBuffer


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
    episodes = collector.collect(ppo, buffer)
    assert buffer.obs[:, 0].tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2], [2, 0]]
    assert buffer.rewards[:, 0].tolist() == [1, 2, 3, 1, 2, 3, 1]
    assert buffer.terminations[:, 0].nonzero().flatten().tolist() == [2]
    assert buffer.truncations[:, 0].nonzero().flatten().tolist() == [5]
    # The value of where the second episode was cut, (1, 3), not of the third's beginning.
    cut = ppo.get_value(np.array([[1, 3]], dtype=np.float32))[0]
    assert buffer.final_values[:, 0].tolist() == [0, 0, 0, 0, 0, cut, 0]
    assert buffer.valid.all()
    assert collector.obs.tolist() == [[2, 1]]
    assert episodes == [Episode(env=0, episode_return=6.0, length=3)] * 2


def test_next_step_rollouts_mark_the_resetting_steps_invalid() -> None:
    ppo, buffer = an_agent(1), RolloutBuffer(8, 1, 2)
    episodes = RolloutCollector(counters(AutoresetMode.NEXT_STEP, 3)).collect(ppo, buffer)
    assert buffer.obs[:, 0].tolist() == [[0, 0], [0, 1], [0, 2], [0, 3], [1, 0], [1, 1], [1, 2], [1, 3]]
    assert (~buffer.valid[:, 0]).nonzero().flatten().tolist() == [3, 7]
    cut = ppo.get_value(np.array([[1, 3]], dtype=np.float32))[0]
    assert buffer.final_values[:, 0].tolist() == [0, 0, 0, 0, 0, 0, cut, 0]
    assert episodes == [Episode(env=0, episode_return=6.0, length=3)] * 2


def test_both_modes_learn_from_the_same_numbers() -> None:
    """Over four whole episodes, advantages of valid steps agree; the actions play no part in this environment."""
    outcomes = []
    for mode, steps in ((AutoresetMode.SAME_STEP, 12), (AutoresetMode.NEXT_STEP, 16)):
        ppo, buffer = an_agent(1), RolloutBuffer(steps, 1, 2)
        collector = RolloutCollector(counters(mode, 3))
        collector.collect(ppo, buffer)
        advantages, _ = compute_gae(
            buffer.rewards,
            buffer.values,
            buffer.terminations,
            buffer.truncations,
            buffer.final_values,
            torch.from_numpy(ppo.get_value(collector.obs)),
            buffer.valid,
            gamma=0.9,
            gae_lambda=0.8,
        )
        outcomes.append(advantages[buffer.valid])
    assert torch.equal(*outcomes)


def test_episodes_run_on_from_one_rollout_to_the_next() -> None:
    ppo, buffer = an_agent(2), RolloutBuffer(2, 2, 2)
    collector = RolloutCollector(counters(AutoresetMode.SAME_STEP, 3, 5))
    ended = []
    for _ in range(3):
        ended.append(collector.collect(ppo, buffer))
        buffer.reset()
    assert ended == [
        [],
        [Episode(env=0, episode_return=6.0, length=3)],
        [Episode(env=1, episode_return=15.0, length=5), Episode(env=0, episode_return=6.0, length=3)],
    ]


def test_environments_that_do_not_reset_themselves_are_refused() -> None:
    with pytest.raises(ValueError, match=r"make it with autoreset_mode=AutoresetMode.SAME_STEP"):
        RolloutCollector(counters(AutoresetMode.DISABLED, 3))


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
    assert Policy.from_state_dict(load_checkpoint(path)["policy"])(torch.zeros(1, 4))[0].shape == (1, 2)
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
    torch.save({"policy": Opener()}, tmp_path / "hostile.pt")
    Path("hostile.pickle").write_bytes(pickle.dumps({"policy": Opener()}))
    for name in ("hostile.pt", "hostile.pickle"):
        with pytest.raises(ValueError, match="cannot read the checkpoint") as raised:
            load_checkpoint(tmp_path / name)
        assert "may run code" in str(raised.value)
        assert "weights_only" not in str(raised.value)  # PyTorch advises to load it after all
    assert not Path("must_not_be_made").exists()


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "no checkpoint at"),
        (b"", "cannot read"),
        (b"hello", "cannot read"),
        (b"PK\x03\x04cut short", "cannot read"),
        (pickle.dumps([1, 2], protocol=2), "cannot read|not a checkpoint"),
    ],
)
def test_anything_else_is_one_line(tmp_path: Path, content: bytes | None, complaint: str) -> None:
    path = tmp_path / "some.pt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=complaint) as caught:
        load_checkpoint(path)
    assert "\n" not in str(caught.value)
    assert "some.pt" in str(caught.value)


def test_a_truncated_checkpoint_is_one_line(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "some.pt", PPO(4, 2, PPOConfig()).state_dict())
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(ValueError, match="cannot read") as caught:
        load_checkpoint(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("strip", [False, True], ids=["digest", "as older versions wrote it"])
def test_a_flipped_bit_is_found_or_harmless(tmp_path: Path, strip: bool) -> None:
    path = save_checkpoint(tmp_path / "some.pt", {"policy": {"w": torch.arange(64.0)}, "updates_done": 3})
    content = path.read_bytes()[:-71] if strip else path.read_bytes()
    rng, found, flips = random.Random(5), 0, 400
    for _ in range(flips):
        damaged = bytearray(content)
        damaged[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            state = load_checkpoint(path)
        except ValueError as error:
            found += "some.pt" in str(error)
        else:
            assert state["updates_done"] == 3
            assert torch.equal(state["policy"]["w"], torch.arange(64.0))
    assert found > (flips // 2 if strip else flips * 0.95)  # elsewhere are bytes that nothing reads


def test_a_checkpoint_of_an_older_version_loads(tmp_path: Path) -> None:
    torch.save({"policy": {"w": torch.ones(2)}}, tmp_path / "old.pt")
    assert load_checkpoint(tmp_path / "old.pt")["policy"]["w"].tolist() == [1, 1]


def test_a_folder_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot read"):
        load_checkpoint(tmp_path)


def test_another_dictionary_is_no_checkpoint(tmp_path: Path) -> None:
    torch.save({"model": 1}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match="no entry 'policy'"):
        load_checkpoint(tmp_path / "other.pt")
