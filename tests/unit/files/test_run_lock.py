"""The lock of a run folder: one process writes, a dead one's lock is taken over, another host's is not."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from query_mutator.errors import DiskError, UsageError
from query_mutator.files import LOCK
from query_mutator.files.json_lines import read_json_lines
from query_mutator.files.lock import locked
from query_mutator.files.metrics import MetricsWriter
from query_mutator.lab.analysis.events import merged, read_event_file

HOLD = """
import sys, time
from pathlib import Path
from query_mutator.errors import UsageError
from query_mutator.files.lock import locked
try:
    with locked(Path(sys.argv[1])):
        print("held", flush=True)
        sys.stdin.read()
except UsageError as error:
    print(error, flush=True)
"""
FORK = """
import os, sys, time
from pathlib import Path
from query_mutator.files.lock import locked
with locked(Path(sys.argv[1])):
    child = os.fork()
    if child:
        print(child, flush=True)
    time.sleep(60)
"""


def start(code: str, folder: Path) -> subprocess.Popen[str]:
    argv = [sys.executable, "-c", code, str(folder)]
    return subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_of_processes_that_start_at_once_one_holds_the_lock(tmp_path: Path) -> None:
    processes = [start(HOLD, tmp_path) for _ in range(4)]
    lines = [first_line(process) for process in processes]
    holder = processes[lines.index("held")]
    refused = [line for line in lines if line != "held"]
    assert refused == [f"{tmp_path} is being written by process {holder.pid} on this host; wait for it, or stop it"] * 3
    for process in processes:
        process.communicate("")
    with locked(tmp_path):
        pass
    assert not (tmp_path / LOCK).exists()


def test_the_lock_of_a_killed_process_is_taken_over(tmp_path: Path) -> None:
    process = start(HOLD, tmp_path)
    assert first_line(process) == "held"
    process.kill()
    process.communicate()
    assert (tmp_path / LOCK).exists()
    with locked(tmp_path):
        assert (tmp_path / LOCK).read_text().startswith(f"{os.getpid()}\n")


def test_a_child_that_outlives_the_owner_does_not_hold_the_lock(tmp_path: Path) -> None:
    process = start(FORK, tmp_path)
    child = int(first_line(process))
    try:
        process.kill()
        process.wait()
        with locked(tmp_path):
            os.kill(child, 0)
            os.kill(child, signal.SIGTERM)  # its end must not release our lock
            time.sleep(0.1)
            assert (tmp_path / LOCK).read_text().startswith(f"{os.getpid()}\n")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        process.communicate()


def test_a_process_id_that_was_given_to_another_process_is_not_the_owner(tmp_path: Path) -> None:
    process = start(HOLD, tmp_path)
    assert first_line(process) == "held"
    _, host, began = (tmp_path / LOCK).read_text().split()
    process.communicate("")
    (tmp_path / LOCK).write_text(f"{os.getppid()}\n{host}\n{began}\n")
    with locked(tmp_path):
        pass


def test_the_lock_of_another_host_is_taken_over_only_with_the_flag(tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text(f"{os.getpid()}\nnode-7\n")
    with pytest.raises(UsageError, match=r"written by pid \d+ on node-7.*--break-lock"), locked(tmp_path):
        pass
    with locked(tmp_path, break_lock=True):
        assert (tmp_path / LOCK).read_text().startswith(f"{os.getpid()}\n")
        with pytest.raises(UsageError, match="is being written by process"), locked(tmp_path, break_lock=True):
            pass
    assert not (tmp_path / LOCK).exists()


def test_an_empty_lock_is_nobodys_and_taken_over_with_the_flag(tmp_path: Path) -> None:
    (tmp_path / LOCK).touch()
    with pytest.raises(UsageError, match="--break-lock"), locked(tmp_path):
        pass
    with locked(tmp_path, break_lock=True):
        pass


def test_a_folder_that_cannot_be_written_is_a_disk_error(tmp_path: Path) -> None:
    for folder in (Path("/proc/self"), Path("/proc/nowhere")):
        with pytest.raises(DiskError, match="cannot be written"), locked(folder):
            pass
    (tmp_path / "file").touch()
    with pytest.raises(DiskError, match="cannot be written"), locked(tmp_path / "file"):
        pass


def test_a_folder_that_stayed_empty_is_removed(tmp_path: Path) -> None:
    with locked(tmp_path / "a" / "b"):
        pass
    assert not (tmp_path / "a" / "b").exists()


def test_row_has_step_clock_and_numbers(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    writer.write({"validation/success": 0.25, "llm/calls": 12}, step=512, wall_s=1.23456)
    writer.close()
    (row,) = read_json_lines(tmp_path / "metrics.jsonl")
    assert row == {
        "step": 512,
        "wall_s": 1.235,
        "validation/success": 0.25,
        "llm/calls": 12.0,
    }


def test_number_that_is_not_finite_is_left_out(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    writer.write({"validation/success": float("nan"), "validation/score": 1.0}, step=1, wall_s=0)
    writer.close()
    assert list(read_json_lines(tmp_path / "metrics.jsonl")) == [{"step": 1, "wall_s": 0, "validation/score": 1.0}]


def test_unknown_key_is_refused(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    with pytest.raises(KeyError, match="validation/sucess"):
        writer.write({"validation/sucess": 1.0}, step=1, wall_s=0)
    writer.close()
    writer.close()


def scalars(folder: Path, key: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(key)]


def test_tensorboard_reads_the_same_numbers(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    for step in (1, 2):
        writer.write({"validation/success": step / 4}, step=step, wall_s=step)
    writer.close()
    assert scalars(tmp_path, "validation/success") == [(1, 0.25), (2, 0.5)]


def test_a_clock_that_is_set_back_leaves_the_points_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = MetricsWriter(tmp_path)
    for step in (1, 2, 3):
        first.write({"validation/success": step / 4}, step=step, wall_s=step)
    first.close()
    now_s = time.time() - 3600
    monkeypatch.setattr(time, "time", lambda: now_s)
    monkeypatch.setattr(time, "time_ns", lambda: int(now_s * 1e9))
    again = MetricsWriter(tmp_path, first_step=2)
    again.write({"validation/success": 1.0}, step=3, wall_s=3)
    again.close()
    expected = [(1, 0.25), (2, 0.5), (3, 1.0)]
    assert scalars(tmp_path, "validation/success") == expected
    files = [read_event_file(path) for path in sorted((tmp_path / "tensorboard").iterdir())]
    series = merged(files, "validation/success")
    assert list(zip(series.step.tolist(), series.value.tolist(), strict=True)) == expected


def test_going_on_drops_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    first = MetricsWriter(tmp_path)
    first.write({"validation/success": 0.25}, step=1, wall_s=1)
    kept = first.rows.size_bytes
    first.write({"validation/success": 0.9}, step=2, wall_s=2)
    first.close()
    second = MetricsWriter(tmp_path, cut_at=kept, first_step=1)
    second.write({"validation/success": 0.5}, step=2, wall_s=2)
    second.close()
    rows = read_json_lines(tmp_path / "metrics.jsonl")
    assert [(row["step"], row["validation/success"]) for row in rows] == [(1, 0.25), (2, 0.5)]
    assert scalars(tmp_path, "validation/success") == [(1, 0.25), (2, 0.5)]
