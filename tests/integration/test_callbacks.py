"""A user's callback by --plugin: called on every hook, resumed after a kill, and named in an error."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from query_mutator.errors import UsageError
from query_mutator.files.json_lines import read_json_lines
from query_mutator.training.callbacks import CALLBACKS, Callback, RunView
from train_query_mutator import main

ROOT = Path(__file__).resolve().parents[2]
PLUGIN = ROOT / "tests" / "plugins" / "csv_callback.py"


@pytest.mark.slow
def test_a_callback_from_a_file_survives_a_kill(tiny_flags: list[str], tmp_path: Path) -> None:
    flags = [*tiny_flags, "--plugin", str(PLUGIN), "--save-interval", "1", "--num-env-steps", "96", "--no-evaluate"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert main([*flags, "--save-dir", str(whole)]) == 0
    rows = (whole / "latest" / "rollouts.csv").read_text()
    steps = [int(row.split(",")[0]) for row in rows.splitlines()]
    assert steps[-1] == 96
    assert sum(int(row.split(",")[1]) for row in rows.splitlines()) == 96

    command = [sys.executable, "train_query_mutator.py", *flags, "--save-dir", str(killed)]
    environ = {**os.environ, "KILLED_AT": str(steps[-2])}
    assert subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, timeout=120, check=False).returncode == 9
    run = (killed / "latest").resolve()
    assert len((run / "rollouts.csv").read_text().splitlines()) == len(steps) - 1
    assert main(["--resume", str(run)]) == 0
    assert (run / "rollouts.csv").read_text() == rows
    assert "custom/csv_bytes" in list(read_json_lines(run / "metrics.jsonl"))[-1]


def test_an_error_in_a_callback_is_one_line_that_names_it(tiny_flags: list[str]) -> None:
    @CALLBACKS.register("broken")
    class Broken(Callback):
        def on_rollout_end(self, run: RunView) -> None:
            raise KeyError("reward")

    with pytest.raises(UsageError, match="callback 'broken' failed in on_rollout_end: KeyError: 'reward'"):
        main([*tiny_flags, "--no-evaluate"])


def test_a_metric_of_a_callback_needs_its_prefix(tiny_flags: list[str]) -> None:
    @CALLBACKS.register("namer")
    class Namer(Callback):
        def on_log(self, run: RunView) -> None:
            run.row["my/figure"] = 1.0

    with pytest.raises(UsageError, match="call it custom/figure"):
        main([*tiny_flags, "--no-evaluate"])
