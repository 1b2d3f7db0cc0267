"""Run folders: never an existing one, row files that survive, checkpoints that are verified, states of runs."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ppo.algorithm import PPO
from ppo.config import PPOConfig
from query_mutator.env.episode import Projection
from query_mutator.errors import CheckpointError
from query_mutator.files import LOCK, locked
from query_mutator.files.run_dir import RunDir, run_state
from query_mutator.training.run_folder import Checkpoint, Progress, read_checkpoint
from query_mutator.types import STORED_CHARS, StepRecord

RECORD = StepRecord(
    env=1,
    step=2,
    episode=0,
    question_id="q7",
    operator="spelling",
    question="wat is a stak",
    rewrite="what is a stack",
    answer="`queue.LifoQueue`: …",
    baseline_score=0.25,
    score=0.5,
    reward=0.23,
    parts={"right": 1.0},
    timing={"latency_s": 0.1},
)


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "runs", "test")


def test_latest_is_the_newest_run_with_a_step_and_runs_within_a_second_have_two_folders(tmp_path: Path) -> None:
    runs = [RunDir.create(tmp_path, "same") for _ in range(3)]
    assert len({run.path for run in runs}) == 3
    assert not (tmp_path / "latest").exists()
    for run in runs[:2]:
        run.add_record(RECORD)
        run.write_records()
        assert (tmp_path / "latest").resolve() == run.path.resolve()
    runs[0].write_records()
    runs[2].write_records()  # no step yet
    assert (tmp_path / "latest").resolve() == runs[1].path.resolve()


def test_a_transcript_holds_texts_to_a_stated_length() -> None:
    assert "cut" not in RECORD.to_json()
    row = replace(RECORD, answer="a" * 5_000_000, rewrite="r" * STORED_CHARS).to_json()
    assert (row["answer"], row["rewrite"]) == ("a" * STORED_CHARS, "r" * STORED_CHARS)
    assert row["cut"] == {"answer": 5_000_000}


def test_something_else_called_latest_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "latest").mkdir()
    run = RunDir.create(tmp_path, "test")
    run.take_latest()
    assert not (tmp_path / "latest").is_symlink()
    assert "does not point to" in caplog.text


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return the folder of a run with a config.json."""
    run_dir = RunDir.create(tmp_path / "runs", "test")
    run_dir.write_config({"flags": {"seed": 3, "hidden_sizes": [64, 64], "operators": ""}, "plugins": {"a.py": "0"}})
    return run_dir.path


@pytest.fixture
def checkpoint() -> Checkpoint:
    ppo = PPO(6, 4, PPOConfig(num_processes=2, num_steps=4, num_mini_batch=2))
    return Checkpoint(
        learner=ppo.state_dict(),
        projection=Projection(mean=np.zeros(3, np.float32), components=np.eye(3, 2, dtype=np.float32)),
        progress=Progress(env_steps=8, wall_s=1.5),
    )


def test_checkpoint_comes_back_whole_with_the_flags_of_its_run(run: Path, checkpoint: Checkpoint) -> None:
    path = checkpoint.save(run)
    assert path == run / "resume.pt"
    read = read_checkpoint(run)
    assert (read.progress, read.path) == (checkpoint.progress, path)
    assert read.flags == {"seed": 3, "hidden_sizes": [64, 64], "operators": ""}
    assert read.plugins == {"a.py": "0"}
    np.testing.assert_array_equal(read.projection.components, checkpoint.projection.components)
    assert set(torch.load(path, weights_only=True)["learner"]) == set(checkpoint.learner)


def test_the_state_before_stays_and_stands_in_for_a_damaged_one(
    run: Path, checkpoint: Checkpoint, caplog: pytest.LogCaptureFixture
) -> None:
    for steps in (8, 16, 24):
        replace(checkpoint, progress=Progress(env_steps=steps)).save(run)
    assert {path.name for path in run.glob("*.pt")} == {"resume.pt", "resume.previous.pt"}
    assert read_checkpoint(run).progress.env_steps == 24
    (run / "resume.pt").write_bytes(b"torn")
    previous = read_checkpoint(run)
    assert previous.progress.env_steps == 16
    assert "resume.pt" in caplog.text
    assert "using the previous one" in caplog.text
    replace(checkpoint, progress=Progress(env_steps=32)).save(run, keep_newest=False)  # the torn one
    assert read_checkpoint(run).progress.env_steps == 32
    (run / "resume.pt").unlink()  # killed between the two renames
    assert read_checkpoint(run).progress.env_steps == 16


@pytest.mark.parametrize("content", [b"not a checkpoint", b""])
def test_unreadable_checkpoint_is_an_error(run: Path, content: bytes) -> None:
    (run / "resume.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match="cannot read the checkpoint"):
        read_checkpoint(run)
    torch.save({"policy": {}, "epoch": 3}, run / "resume.pt")
    with pytest.raises(CheckpointError, match="not a checkpoint of query mutator"):
        read_checkpoint(run)


def test_missing_checkpoint_says_what_to_give(run: Path, tmp_path: Path) -> None:
    for folder in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(CheckpointError, match=r"is not of a run, .*; give a run folder such as runs/latest"):
            read_checkpoint(folder)
    with pytest.raises(CheckpointError, match="was stopped before its first checkpoint"):
        read_checkpoint(run)


@pytest.mark.parametrize(
    ("lock", "summary", "state"),
    [
        (None, None, "interrupted"),
        (None, '{"env_steps": 64}', "interrupted"),  # of the part before it was resumed
        (None, '{"env_steps": 128}', "finished"),
        (None, '{"plan": {}}', "finished"),
        ("ours", None, "running"),
        ("ours", '{"env_steps": 128}', "finished"),
        ("dead", None, "killed"),
        ("dead", '{"env_steps": 64}', "killed"),
        ("another host's", None, "running"),
    ],
)
def test_states_of_a_run(lock: str | None, summary: str | None, state: str, tmp_path: Path) -> None:
    if summary is None or "env_steps" in summary:
        (tmp_path / "metrics.jsonl").write_text('{"step": 64, "wall_s": 1.0}\n{"step": 128, "wall_s": 2.0}\n{"st')
    if summary is not None:
        (tmp_path / "summary.json").write_text(summary)
        os.utime(tmp_path / "summary.json", (1.0, 1.0))  # older than a lock
    if lock in ("dead", "another host's"):
        host = socket.gethostname() if lock == "dead" else "another.host"
        (tmp_path / LOCK).write_text(f"{dead_process()}\n{host}\n")
    with locked(tmp_path) if lock == "ours" else contextlib.nullcontext():
        if lock == "ours" and summary:
            (tmp_path / "summary.json").write_text(summary)
        assert run_state(tmp_path) == state


def dead_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid
