"""Numbers that are not finite stop a run before they reach its weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from ppo.__main__ import main
from ppo.collect import NotFiniteError, require_finite

BROKEN = "Broken-v0"
SMALL = ["--env", BROKEN, "--num-envs", "2", "--num-steps", "8", "--eval-episodes", "2", "--total-timesteps", "160"]


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
    what: str,
    step: int,
    value: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
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


def test_the_first_row_that_is_not_finite_is_named() -> None:
    values = np.array([[0.0, 1.0], [2.0, math.inf], [math.nan, 0.0]], dtype=np.float32)
    with pytest.raises(NotFiniteError, match=r"^environment 7, step 9: the observation has the value inf; "):
        require_finite("observation", values, lambda row: (6 + row, 9))
    require_finite("observation", values[:1], lambda row: (row, 9))
