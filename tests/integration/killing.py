"""Trainers in processes of their own that are killed at chosen moments, and what they leave."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from query_mutator.cli.console import run_cli
from query_mutator.files import read_json_lines
from query_mutator.training.run_folder import read_checkpoint
from train_query_mutator import main

# A server of processes that has loaded what a trainer needs: a child begins within milliseconds.
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(
    [
        *("torch._dynamo", "torch.fx.experimental.symbolic_shapes", "matplotlib.figure", "tensorboard.compat.proto"),
        *("tensorboard.summary.writer.record_writer", "query_mutator.evaluation.heldout", "query_mutator.testing"),
        *("query_mutator.confidence", "query_mutator.training.loop", "query_mutator.training.callbacks"),
        "tests.integration.killing",
    ]
)


Main = Callable[[Sequence[str]], int]


def _run(entry: Main, argv: Sequence[str], output: Path) -> None:
    sys.stdout = sys.stderr = output.open("a", encoding="utf-8")
    torch.set_num_threads(1)
    sys.argv[1:] = argv
    run_cli(entry, prog="train")


def start(argv: Sequence[str], folder: Path, entry: Main = main) -> BaseProcess:
    """Return a trainer, or another command, that was just started; what it says is appended to `output.txt`."""
    process = _PROCESSES.Process(target=_run, args=(entry, list(argv), folder / "output.txt"))
    process.start()
    return process


def train(argv: Sequence[str], folder: Path, entry: Main = main) -> None:
    """Run a trainer, or another command, to its end, which must be a good one."""
    process = start(argv, folder, entry)
    process.join()
    assert process.exitcode == 0, (folder / "output.txt").read_text(encoding="utf-8")


def kill_when(process: BaseProcess, moment: Callable[[], bool], *, number: int = signal.SIGKILL) -> bool:
    """Kill a trainer at a moment, or send it another signal and wait for its end; False when it ended before."""
    while process.is_alive():
        if moment():
            assert process.pid is not None
            os.kill(process.pid, number)
            process.join()
            return True
        time.sleep(0.001)
    return False


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
