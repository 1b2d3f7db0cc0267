"""`qm sweep --engine ray` on a cluster of two nodes: nodes and drivers die, results equal the local engine's."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from query_mutator.cluster import connected
from query_mutator.cluster.jobs import RayEngine, _run_job
from query_mutator.errors import UsageError
from query_mutator.files import LOCK
from query_mutator.lab.sweep.trials import EngineFlags, Job, Trial
from tests.cluster.conftest import RayCluster, processes_with, wait_until
from tests.qm_command import qm

pytestmark = pytest.mark.slow

#: A trainer: it takes part of a second, and notes in its folder that it began.
TRAINER = """
import json, os, sys, time
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
with open(os.path.join(os.environ["QM_TRIAL_DIR"], "began"), "a") as file:
    file.write("x")
time.sleep(float(flags["--seconds"]))
x, seed = float(flags["--x"]), int(flags["--seed"])
print(json.dumps({"success": 0.7 - 0.03 * (x - 3) ** 2 + 0.0001 * (seed % 7 * x % 5)}))
"""


@pytest.fixture
def trainer(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(TRAINER)
    return path


def sweep_words(folder: Path, trainer: Path, *flags: str, seconds: float) -> list[str]:
    """Return the words of a sweep of twelve trials."""
    grid = ["sweep", "--grid", "x=1,2,4,8", "--seeds", "3", "--out", str(folder), *flags]
    return [*grid, "--", "{python}", str(trainer), "--seconds", str(seconds)]


def rows_of(folder: Path) -> list[dict[str, Any]]:
    path = folder / "trials.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def began(folder: Path) -> dict[str, int]:
    """Return how often each trial began."""
    return {path.parent.name: len(path.read_text()) for path in (folder / "trials").glob("*/began")}


def results_of(folder: Path) -> Mapping[str, Any]:
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return found


def trial_of(process: psutil.Process) -> str:
    """Return the name of the trial that a process runs, "" if it has ended."""
    try:
        words = process.cmdline()
    except psutil.NoSuchProcess:
        return ""
    flags = dict(itertools.pairwise(words))
    return f"x={flags.get('--x')},seed={flags.get('--seed')}"


def files_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_sweep_survives_a_node_and_finds_what_the_local_engine_finds(
    ray_cluster: RayCluster, tmp_path: Path, trainer: Path
) -> None:
    folder, local, (node,) = tmp_path / "ray", tmp_path / "local", ray_cluster.workers

    def is_in_the_middle() -> bool:
        known, begun = {one.pid for one in node.processes}, began(folder)
        ours = [one for one in processes_with(str(trainer)) if one.pid in known]
        return len(rows_of(folder)) >= 2 and any(trial_of(one) in begun for one in ours)

    def kill() -> None:
        wait_until(is_in_the_middle, "no trial runs on the worker")
        node.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    assert qm(*sweep_words(folder, trainer, "--engine", "ray", seconds=1.5)) == 0
    killer.join()
    assert not node.is_alive
    assert [row["status"] for row in rows_of(folder)] == ["done"] * 12
    counts = began(folder)
    assert (len(counts), sum(counts.values())) == (12, 13)  # the trial of the lost node began twice
    assert qm(*sweep_words(local, trainer, "--jobs", "2", seconds=0.0)) == 0
    found, wanted = results_of(folder), results_of(local)
    assert {key: found[key] for key in ("sentence", "settings", "trials", "optimum", "failed")} == {
        key: wanted[key] for key in ("sentence", "settings", "trials", "optimum", "failed")
    }
    assert files_of(folder) == files_of(local)


def test_a_killed_driver_takes_its_trials_along_and_the_same_command_runs_the_missing_ones(
    ray_cluster: RayCluster, tmp_path: Path, trainer: Path
) -> None:
    folder = tmp_path / "s"
    words = sweep_words(folder, trainer, "--engine", "ray", "--ray-address", ray_cluster.address, seconds=0.4)
    driver = subprocess.Popen([sys.executable, "-m", "query_mutator", *words], stderr=subprocess.DEVNULL)
    wait_until(lambda: len(rows_of(folder)) >= 3 and len(processes_with(str(trainer))) > 1, "no trial ends")
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    wait_until(lambda: not processes_with(str(trainer)), "a trial outlives its driver", within_s=20)
    done = {row["name"] for row in rows_of(folder)}
    assert 3 <= len(done) < 12
    assert qm(*words) == 0
    assert sorted(row["name"] for row in rows_of(folder)) == sorted(began(folder))
    assert len(rows_of(folder)) == 12
    assert {name for name, count in began(folder).items() if count > 1}.isdisjoint(done)


def test_a_node_that_does_not_see_the_folder_is_one_line(tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text("of this one")
    trial = Trial(setting={}, seed=0)
    job = Job(trial=trial, command=("{python}", "-c", "print(1)"), folder=tmp_path / "trials" / trial.name)
    for lock, owner in ((tmp_path / LOCK, b"of another machine"), (tmp_path / "elsewhere" / LOCK, b"of this one")):
        with pytest.raises(UsageError, match=r"is not shared with .*; give an --out that is"):
            _run_job(job, tmp_path, lock, owner)
    assert not job.folder.exists()


def test_resources_decide_how_many_trials_run_and_what_no_node_has_is_said(
    ray_cluster: RayCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / LOCK).write_text("x")
    with connected(None) as ray:
        wait_until(lambda: ray.cluster_resources().get("CPU") == 2, "the worker has not joined")
        assert RayEngine(ray, EngineFlags(), folder=tmp_path).slots == 2
        assert RayEngine(ray, EngineFlags(jobs=1), folder=tmp_path).slots == 1
        assert RayEngine(ray, EngineFlags(task_cpus=0.25), folder=tmp_path).slots == 8
        needy = RayEngine(ray, EngineFlags(task_gpus=1, task_resources=("server=2",)), folder=tmp_path)
        assert needy.slots == 1
        assert list(needy.run([])) == []
    assert "no node of the cluster has 1 CPU, 1 GPU, 2 server; trials wait" in capsys.readouterr().err


def test_a_trial_whose_worker_dies_too_often_has_failed_and_can_be_retried(
    ray_cluster: RayCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    killer = tmp_path / "killer.py"  # kills the worker that runs it, as the kernel does when memory runs out
    killer.write_text(
        "import os, sys, time\n"
        "file = os.path.join(os.environ['QM_TRIAL_DIR'], 'began')\n"
        "open(file, 'a').write('x')\n"
        "if len(open(file).read()) <= 2:\n"
        "    os.kill(os.getppid(), 9)\n"
        "    time.sleep(60)\n"
        "print('{\"success\": 0.5}')\n"
    )
    folder = tmp_path / "s"
    words = ["sweep", "--grid", "x=1", "--seeds", "1", "--out", folder, "--engine", "ray", "--task-retries", "1"]
    command = ["--", "{python}", killer]
    assert qm(*words, *command) == 2  # no trial has a number
    assert "lost with its node or worker more often than --task-retries" in capsys.readouterr().err
    assert began(folder) == {"x=1,seed=1": 2}
    assert qm(*words, "--retry-failed", *command) == 0
    assert began(folder) == {"x=1,seed=1": 3}
    assert [row["status"] for row in rows_of(folder)] == ["failed", "done"]
