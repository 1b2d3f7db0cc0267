"""Trainers in processes of their own that are killed at chosen moments, and what they leave."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from query_mutator.files import read_json_lines
from query_mutator.training.run_folder import read_checkpoint
from tests.promises.helpers import TRAIN, Command, good, run


def start(argv: Sequence[str], folder: Path, program: Sequence[str] = TRAIN) -> Command:
    """Return a trainer, or another command, that was just started in a folder."""
    return Command([*program, *argv], cwd=folder)


def train(argv: Sequence[str], folder: Path) -> None:
    """Run a trainer to its end, which must be a good one."""
    good(run([*TRAIN, *argv], cwd=folder))


def kill_when(process: Command, moment: Callable[[], bool], *, number: int = signal.SIGKILL) -> bool:
    """Kill a trainer at a moment, or send it another signal and wait for its end; False when it ended before."""
    if not process.wait_for(moment, timeout_s=120):
        return False
    process.signal(number)
    return process.poll(60) is not None


def run_in(save_dir: Path) -> Path:
    """Return the one run folder; `latest` names it only after the first step, which a kill may forestall."""
    (run,) = {path.parent for path in save_dir.glob("*/config.json")} - {save_dir / "latest"}
    return run


def weights(run: Path) -> dict[str, Any]:
    """Return the policy in a run's newest checkpoint."""
    policy: dict[str, Any] = read_checkpoint(run).learner["policy"]
    return policy


def transcript(run: Path) -> list[dict[str, Any]]:
    """Return a run's steps by environment and step, without what depends on the clock."""
    rows = [{**row, "timing": None} for row in read_json_lines(run / "transcripts.jsonl")]
    return sorted(rows, key=lambda row: (row["env"], row["step"]))
