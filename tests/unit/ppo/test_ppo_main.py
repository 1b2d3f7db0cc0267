"""`python -m ppo`: it learns CartPole, resumes from a checkpoint, and reports invalid input."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ppo.__main__ import main, make_envs


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


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
        (["--env", "NoSuchThing-v1"], "cannot make the environment"),
        (["--num-minibatches", "7"], "must divide num_processes*num_steps=512; try 4 or 8"),
        (["--totaltimesteps", "7"], "Perhaps you meant: --total-timesteps"),
        (["--resume", "nowhere.pt"], "no checkpoint at nowhere.pt"),
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


def test_help_loads_no_torch() -> None:
    code = "import atexit, sys; from ppo.__main__ import main; atexit.register(lambda: print('torch' in sys.modules)); "
    done = subprocess.run([sys.executable, "-c", code + "main(['--help'])"], capture_output=True, text=True, check=True)
    assert "--total-timesteps" in done.stdout
    assert done.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize(("env", "obs_dim"), [("FrozenLake-v1", 16), ("Acrobot-v1", 6)])
def test_observations_of_any_shape_arrive_flat(env: str, obs_dim: int) -> None:
    envs = make_envs(env, 2)
    assert envs.reset(seed=0)[0].shape == (2, obs_dim)
    envs.close()
