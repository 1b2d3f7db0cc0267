"""The state of a run, from the lock, the summary and the metrics of its folder."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from query_mutator.files import LOCK
from query_mutator.files.lock import locked
from query_mutator.files.run_dir import run_state


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "metrics.jsonl").write_text('{"step": 64, "wall_s": 1.0}\n{"step": 128, "wall_s": 2.0}\n{"st')
    return tmp_path


def write_summary(folder: Path, *, steps: int) -> None:
    (folder / "summary.json").write_text(f'{{"env_steps": {steps}}}')


def dead_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_run_is_running_while_its_process_lives_and_finished_with_its_summary(folder: Path) -> None:
    with locked(folder):
        assert run_state(folder) == "running"
        write_summary(folder, steps=128)
        assert run_state(folder) == "finished"
    assert run_state(folder) == "finished"


def test_without_a_summary_it_was_interrupted(folder: Path) -> None:
    assert run_state(folder) == "interrupted"
    write_summary(folder, steps=64)  # of the part before it was resumed
    assert run_state(folder) == "interrupted"
    write_summary(folder, steps=128)
    assert run_state(folder) == "finished"


def test_a_lock_of_a_dead_process_means_killed(folder: Path) -> None:
    (folder / LOCK).write_text(f"{dead_process()}\n{socket.gethostname()}\n")
    assert run_state(folder) == "killed"
    write_summary(folder, steps=64)
    os.utime(folder / "summary.json", (1.0, 1.0))  # of an earlier part of the run
    assert run_state(folder) == "killed"


def test_a_process_of_another_host_counts_as_running(folder: Path) -> None:
    (folder / LOCK).write_text(f"{dead_process()}\nanother.host\n")
    assert run_state(folder) == "running"


def test_the_summary_of_a_plan_has_no_steps(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text('{"plan": {}}')
    assert run_state(tmp_path) == "finished"
