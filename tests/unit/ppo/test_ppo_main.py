"""`python -m ppo`: it learns CartPole, resumes, checks its settings, and stops where a number is not finite."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from ppo.__main__ import Args, main, make_envs, parse
from ppo.config import PPOConfig

BROKEN = "Broken-v0"
SMALL = ["--env", BROKEN, "--num-envs", "2", "--num-steps", "8", "--eval-episodes", "2", "--total-timesteps", "160"]


def test_cartpole_is_learnt_to_a_good_part_in_a_tenth_of_the_steps(tmp_path: Path) -> None:
    """The whole run (`python -m ppo`) reaches 475 and takes ten times as long."""
    main(["--num-env-steps", "20000", "--eval-episodes", "20", "--json", str(tmp_path / "result.json")])
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["mean_return"] > 150  # a random policy gets about 22
    assert result["env_steps"] == 20_480


def test_a_run_can_be_saved_and_gone_on_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--num-envs", "2", "--num-steps", "8", "--eval-episodes", "2", "--total-timesteps"]
    main([*small, "32", "--save", str(tmp_path / "a.pt")])
    main([*small, "64", "--resume", str(tmp_path / "a.pt"), "--save", str(tmp_path / "b.pt")])
    first, second = capsys.readouterr().out.splitlines()
    assert "over 2 episodes after 32 steps" in first
    assert "over 2 episodes after 64 steps" in second
    assert torch.load(tmp_path / "b.pt", weights_only=True)["updates_done"] == 4


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--env", "Pendulum-v1"], "needed are Discrete actions"),
        (["--totaltimesteps", "7"], "Did you mean --total-timesteps"),
        (["--device", "toaster"], "--device toaster cannot be used"),
        (["--env", ":9"], "cannot make the environment ':9'"),
        (["--torch-threads", "0"], "torch_threads=0 must be at least 1"),
        (["--eval-episodes", "0"], "eval_episodes=0 must be at least 1"),
        (["--lr", "1e308"], "lr=1e+308 must be at most 10"),
        (["--num-processes", "9" * 20], "must be at most 100000"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_exit_code_2(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("python -m ppo: ")
    assert complaint in line


@pytest.mark.parametrize("flag", ["--json", "--save"])
def test_file_of_another_kind_is_not_replaced(flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").write_text('notes on "mean_return" and data.pkl')
    with pytest.raises(SystemExit, match="2"):
        main([flag, str(tmp_path / "mine")])
    assert "exists and was not written by this command" in capsys.readouterr().err
    assert (tmp_path / "mine").read_text() == 'notes on "mean_return" and data.pkl'


@pytest.mark.parametrize(("env", "obs_dim"), [("FrozenLake-v1", 16), ("Acrobot-v1", 6)])
def test_observations_of_any_shape_arrive_flat(env: str, obs_dim: int) -> None:
    envs = make_envs(env, 2)
    assert envs.reset(seed=0)[0].shape == (2, obs_dim)
    envs.close()


def test_a_rollout_is_what_all_environments_do_between_updates() -> None:
    config = PPOConfig(num_env_steps=1000, num_processes=16, num_steps=32)
    assert (config.rollout_steps, config.num_updates, config.total_steps) == (512, 2, 1024)
    assert PPOConfig(num_env_steps=1).num_updates == 1


@pytest.mark.parametrize(
    ("num_mini_batch", "advice"), [(5, "try 4 or 8"), (513, "try 512"), (3, "try 2 or 4"), (300, "try 256 or 512")]
)
def test_minibatches_that_do_not_divide_the_rollout_name_those_that_do(num_mini_batch: int, advice: str) -> None:
    with pytest.raises(ValueError, match=advice) as caught:
        PPOConfig(num_processes=16, num_steps=32, num_mini_batch=num_mini_batch)
    assert str(caught.value).startswith(f"num_mini_batch={num_mini_batch} must divide num_processes*num_steps=512")


def test_the_other_families_names_set_the_same_fields() -> None:
    cleanrl = "--total-timesteps 999 --num-envs 4 --update-epochs 3 --num-minibatches 2 --learning-rate 0.1"
    cleanrl += " --no-anneal-lr --clip-coef 0.1 --ent-coef 0.5 --vf-coef 0.25"
    ours = "--num-env-steps 999 --num-processes 4 --ppo-epoch 3 --num-mini-batch 2 --lr 0.1 --no-use-linear-lr-decay"
    ours += " --clip-param 0.1 --entropy-coef 0.5 --value-loss-coef 0.25"
    assert parse(cleanrl.split()) == parse(ours.split()) != Args()


class Broken(gym.Env[Any, Any]):
    """Episodes of 5 steps; from step 21 of the run on, one thing that it returns is `value`."""

    observation_space = gym.spaces.Box(-math.inf, math.inf, (3,))
    action_space = gym.spaces.Discrete(2)
    what, value = "", 0.0

    def __init__(self) -> None:
        self.steps = 0

    def _obs(self, *, is_bad: bool) -> Any:
        return np.array([self.steps % 5, 1.0, self.value if is_bad else 0.0], dtype=np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return self._obs(is_bad=self.what == "first observation" and self.steps > 20), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        is_bad, is_last = self.steps > 20, self.steps % 5 == 0
        reward = self.value if is_bad and self.what == "reward" else 1.0
        of_obs = self.what == "observation" or (self.what == "last observation" and is_last)
        return self._obs(is_bad=is_bad and of_obs), reward, False, is_last, {}


@pytest.fixture(autouse=True)
def _broken() -> Iterator[None]:
    before = torch.get_num_threads()
    gym.register(BROKEN, entry_point=Broken)
    yield
    gym.registry.pop(BROKEN)
    torch.set_num_threads(before)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("what", "step"), [("reward", 21), ("observation", 21), ("first observation", 25), ("last observation", 25)]
)
def test_a_run_stops_with_one_line_and_its_last_good_checkpoint(
    what: str, step: int, value: float, tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Broken, "what", what)
    monkeypatch.setattr(Broken, "value", value)
    with pytest.raises(SystemExit, match="2"):
        main([*SMALL, "--save", str(tmp_path / "policy.pt")])
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("python -m ppo: environment 0, step ")
    assert f"environment 0, step {step}: " in line
    assert what.removeprefix("first ") in line
    assert f"has the value {value};" in line
    assert str(tmp_path / "policy.pt") in line
    state = torch.load(tmp_path / "policy.pt", weights_only=True)
    assert state["updates_done"] == (step - 1) // 8
    assert all(weight.isfinite().all() for weight in state["policy"].values())


def test_an_earlier_checkpoint_is_not_replaced_by_an_untrained_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main([*SMALL, "--save", str(tmp_path / "policy.pt")])
    before = (tmp_path / "policy.pt").read_bytes()
    monkeypatch.setattr(Broken, "what", "reward")
    monkeypatch.setattr(Broken, "value", math.nan)
    with pytest.raises(SystemExit, match="2"):
        main([*SMALL, "--num-steps", "32", "--total-timesteps", "640", "--save", str(tmp_path / "policy.pt")])
    assert (tmp_path / "policy.pt").read_bytes() == before
