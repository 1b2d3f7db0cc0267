"""`qm runs`: the state and the figures of every run in a folder, whatever became of it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from query_mutator.files import locked
from query_mutator.files.run_dir import RunDir
from tests.qm_command import qm
from tests.unit.files.test_rundir import RECORD
from train_query_mutator import main as train

FLAGS = {"num_env_steps": 100, "num_processes": 4, "num_steps": 8}


def write_run(folder: Path, *, started: str, steps: int = 0, validation: float | None = None) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"flags": FLAGS, "started": started}), encoding="utf-8")
    rows: list[dict[str, float]] = [{"step": 0} | ({} if validation is None else {"validation/success": validation})]
    rows += [{"step": step, "llm/calls": 2 * step} for step in range(32, steps + 1, 32)]
    text = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(text + '{"step":9999,"llm/ca', encoding="utf-8")  # killed as it wrote
    return folder


def listed(capsys: pytest.CaptureFixture[str], folder: Path) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert qm("runs", folder, "--json") == 0
    runs: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["runs"]
    return runs


def test_states_and_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "b", started="2026-01-02T00:00:00+00:00", steps=64, validation=0.5)
    killed = write_run(tmp_path / "c", started="2026-01-03T00:00:00+00:00", steps=32)
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    (killed / "lock").write_text(f"{process.pid}\n{socket.gethostname()}\n", encoding="utf-8")
    done = write_run(tmp_path / "a", started="2026-01-01T00:00:00+00:00", steps=128, validation=0.25)
    report = {"methods": {"policy": {"success": 0.75}}}
    summary = {"env_steps": 128, "llm_calls": 256, "eval_llm_calls": 44, "eval": report}
    (done / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    running = write_run(tmp_path / "d", started="2026-01-04T00:00:00+00:00")
    (tmp_path / "latest").symlink_to("d")
    (tmp_path / "notes").mkdir()
    (tmp_path / "list.txt").touch()
    with locked(running):
        runs = listed(capsys, tmp_path)
    assert [(run["name"], run["state"], run["steps"], run["steps_asked"]) for run in runs] == [
        ("a", "finished", 128, 128),
        ("b", "interrupted", 64, 128),
        ("c", "killed", 32, 128),
        ("d", "running", 0, 128),
    ]
    assert [run["validation_success"] for run in runs] == [0.25, 0.5, None, None]
    assert [run["held_out_success"] for run in runs] == [0.75, None, None, None]
    assert [run["calls"] for run in runs] == [300, 128, 64, None]


def test_a_real_run_is_listed_with_its_figures(
    tiny_flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train([*tiny_flags, "--plan-calls", "0"]) == 0
    [run] = listed(capsys, tmp_path / "runs")
    summary = json.loads((tmp_path / "runs" / "latest" / "summary.json").read_text(encoding="utf-8"))
    assert (run["state"], run["steps"], run["steps_asked"]) == ("finished", 64, 64)
    assert run["held_out_success"] == summary["eval"]["methods"]["policy"]["success"]
    assert run["validation_success"] is not None
    assert run["calls"] == summary["llm_calls"] + summary["eval_llm_calls"]
    assert [one["name"] for one in listed(capsys, tmp_path / "runs" / "latest")] == [run["name"]]


def test_damaged_files_leave_the_other_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = write_run(tmp_path / "bad", started="soon")
    (bad / "summary.json").write_bytes(b"\x00{[")
    (bad / "metrics.jsonl").write_bytes(b'\xff\n{"step": "many"}\n[1]\n{"step":{}}')
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.json").write_text('{"flags": [1], "started": 5}', encoding="utf-8")
    write_run(tmp_path / "good", started="2026-01-01T00:00:00+00:00", steps=32)
    runs = {run["name"]: run for run in listed(capsys, tmp_path)}
    assert runs.keys() == {"bad", "odd", "good"}
    assert (runs["bad"]["steps"], runs["odd"]["steps_asked"], runs["good"]["steps"]) == (None, None, 32)


def test_no_folder_and_no_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert qm("runs", tmp_path) == 0
    assert capsys.readouterr().out == f"no runs in {tmp_path}\n"
    assert qm("runs", tmp_path / "none") == 2
    assert "none: No such file or directory; give the folder of run folders" in capsys.readouterr().err


def test_a_run_that_ended_before_its_first_step_is_neither_listed_nor_latest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done, killed = RunDir.create(tmp_path, "done"), RunDir.create(tmp_path, "killed")
    for run in (done, killed):
        run.write_config({"flags": FLAGS})
        (run.path / "resume.pt").touch()
    done.add_record(RECORD)
    done.write_records()
    killed.write_records()
    assert [run["name"] for run in listed(capsys, tmp_path)] == [done.path.name]
    assert (tmp_path / "latest").resolve() == done.path.resolve()
    with locked(killed.path):
        assert [run["state"] for run in listed(capsys, tmp_path)] == ["interrupted", "running"]
