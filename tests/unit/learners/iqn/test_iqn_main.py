"""`python -m query_mutator.learners.iqn` on a gymnasium environment: it learns, saves, reports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ppo.checkpoint import load_checkpoint
from query_mutator.cli.console import exit_code
from query_mutator.commands.iqn import main
from query_mutator.learners.iqn.frozen import FrozenQuantiles


def iqn(*argv: str) -> int:
    return exit_code(main, argv, prog="iqn")


def test_a_short_run_balances_the_pole_far_longer_than_chance(tmp_path: Path) -> None:
    """Chance keeps it up for 22 steps; the defaults, which solve it, take ten times as long as this run."""
    flags = ["--total-steps", "4000", "--learning-starts", "200", "--replay-ratio", "16", "--eval-episodes", "20"]
    result = tmp_path / "result.json"
    assert iqn("--env", "CartPole-v1", *flags, "--hidden-sizes", "32", "32", "--json", str(result)) == 0
    told = json.loads(result.read_text())
    assert told["mean_return"] > 80
    assert told["gradient_steps"] == pytest.approx(4000 * 16 / 64, abs=10)


def test_policy_is_saved_whole(tmp_path: Path) -> None:
    path = tmp_path / "policy.pt"
    assert iqn("--total-steps", "64", "--eval-episodes", "1", "--save", str(path)) == 0
    FrozenQuantiles(load_checkpoint(path)["policy"])


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        (["--env", "NoSuch-v0"], "cannot make the environment"),
        (["--env", "Pendulum-v1"], "Discrete"),
        (["--train-batch", "3"], "did you mean --train-batch-size?"),
        (["--num-quantiles", "5"], "must be even"),
    ],
)
def test_a_mistake_is_one_line(flags: list[str], wanted: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert iqn(*flags) == 2
    err = capsys.readouterr().err
    assert wanted in err
    assert err.count("\n") == 1
