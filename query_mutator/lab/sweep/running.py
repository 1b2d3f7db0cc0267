"""Run trials on an engine: finished ones are skipped on a rerun, failures are recorded.

DIR/sweep.json                what is run, so that a folder is not used for two sweeps
DIR/trials.jsonl              a row for each trial that ended: name, setting, seed, status, exit code, seconds
DIR/trials/NAME/              what the trial wrote, with command.txt, stdout.txt and stderr.txt

`LocalEngine` runs trials as processes of this machine, each in a session, so that a signal reaches everything that a
trial started; `cluster.jobs.RayEngine` as Ray tasks.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

from annotated_types import Ge, Le
from cyclopts import Parameter

from query_mutator.bounds import Retries, Threads
from query_mutator.cli.console import closing_on_interrupt, progress
from query_mutator.cli.outputs import OutputFlags
from query_mutator.errors import UsageError, hide_credentials
from query_mutator.files import read_checked_json, write_checked_json, write_text
from query_mutator.files.json_lines import JsonLines, read_json_lines
from query_mutator.lab.sweep.trials import Setting, Trial, command_of
from query_mutator.settings.output import Lock

__all__ = [
    "Ended", "Engine", "EngineFlags", "Job", "LocalEngine", "Processes", "Status", "SweepFolder", "ended", "is_sweep",
    "run_trials",
]  # fmt: skip

Status = Literal["done", "failed", "timed out"]
_Amount = Annotated[float, Ge(0), Le(10000)]
_GRACE_S = 5.0  # between SIGTERM and SIGKILL


def is_sweep(path: Path) -> bool:
    """Return whether a folder is that of a sweep."""
    return (path / "sweep.json").is_file()


@dataclass(frozen=True, kw_only=True)
class EngineFlags(OutputFlags, Lock):
    """Flags of the commands that run trials: where, how many at a time, with which resources."""

    jobs: Threads | None = None
    """Trials that run at the same time; by default 1, or with --engine ray as many as the cluster's resources allow."""
    engine: Literal["local", "ray"] = "local"
    """Where trials run: local, in processes of this machine; ray, as tasks of a Ray cluster."""
    ray_address: str | None = None
    """Address HOST:PORT of the cluster; by default RAY_ADDRESS, else a cluster that runs here, else a new local one."""
    task_cpus: Annotated[_Amount, Parameter(alias="--trial-cpus")] = 1.0
    """CPUs that --engine ray reserves for a trial."""
    task_gpus: Annotated[_Amount, Parameter(alias="--trial-gpus")] = 0.0
    """GPUs that --engine ray reserves for a trial, which sees no others; 0.5 lets two share one."""
    task_resources: Annotated[tuple[str, ...], Parameter(alias="--trial-resources")] = ()
    """NAME=AMOUNT of the cluster's custom resources that --engine ray reserves for a trial."""
    task_retries: Annotated[Retries, Parameter(alias="--trial-retries")] = 3
    """How often --engine ray restarts a trial whose node or worker was lost; a trial that fails is not restarted."""
    retry_failed: bool = False
    """Rerun trials that failed before."""

    def __post_init__(self) -> None:
        for item in self.task_resources:
            if not re.fullmatch(r"[^=]+=(?=.*[1-9])\d*\.?\d+", item):
                raise ValueError(f"--task-resources {item}: write NAME=AMOUNT with an amount above 0, as server=1")

    @property
    def custom_resources(self) -> dict[str, float]:
        """Return the amounts of --task-resources by name."""
        return {name: float(amount) for name, amount in (item.split("=") for item in self.task_resources)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One trial to run: its command, the folder that it writes to, and how long it may take."""

    trial: Trial
    command: tuple[str, ...]
    folder: Path
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a trial ended."""

    name: str
    setting: Setting
    seed: int
    status: Status
    exit_code: int
    wall_s: float
    says: str  # the last line of its stderr, where it failed


def ended(trial: Trial, status: Status, exit_code: int, wall_s: float, says: str) -> Ended:
    """Return how a trial ended; `says` is kept where it failed."""
    return Ended(
        name=trial.name,
        setting=trial.setting,
        seed=trial.seed,
        status=status,
        exit_code=exit_code,
        wall_s=round(wall_s, 2),
        says="" if status == "done" else says,
    )


class Engine(Protocol):
    """Runs jobs, in processes of this machine or on a cluster."""

    @property
    def slots(self) -> int:
        """Return how many jobs run at the same time."""

    def run(self, jobs: Sequence[Job]) -> Generator[Ended]:
        """Run jobs; yield how each ended, first those that ended first. Closing the iterator stops all jobs."""

    def stop(self) -> None:
        """Stop all jobs, from any thread; idempotent."""


class SweepFolder:
    """The folder of a sweep. UsageError when it holds a sweep of another command."""

    def __init__(self, path: Path, **about: str) -> None:
        self.path, self.rows_path = path, path / "trials.jsonl"
        file = path / "sweep.json"
        if not file.exists():
            write_checked_json(file, about)
        elif (before := read_checked_json(file)) != about:
            what = next((name for name in about if before.get(name) != about[name]), "command")
            raise UsageError(f"{path} holds a sweep of another {what} ({before.get(what)}); choose another --out")

    def folder_of(self, trial: Trial) -> Path:
        """Return where a trial writes."""
        return self.path / "trials" / trial.name

    def ended(self) -> dict[str, Ended]:
        """Return how each trial ended, by its last row."""
        rows = read_json_lines(self.rows_path) if self.rows_path.exists() else ()
        try:
            return {row["name"]: Ended(**row) for row in rows}
        except (KeyError, TypeError) as error:
            raise UsageError(f"{self.rows_path}: a row is not a trial ({error}); choose another --out") from None


def run_trials(
    folder: SweepFolder,
    engine: Engine,
    trials: Sequence[Trial],
    *,
    command: Sequence[str],
    timeout_s: float | None = None,
    again: Collection[str] = (),
) -> None:
    """Run the trials of a command that have not ended yet, and those named in `again`; note how each ends.

    A failed trial does not stop the others.
    """
    before = folder.ended()
    jobs = [
        Job(trial=trial, command=tuple(command), folder=folder.folder_of(trial), timeout_s=timeout_s)
        for trial in trials
        if trial.name not in before or trial.name in again
    ]
    with (
        contextlib.closing(JsonLines(folder.rows_path)) as rows,
        closing_on_interrupt(engine.stop),
        contextlib.closing(engine.run(jobs)) as results,
        progress("sweep", len(jobs), unit="trial") as bar,
    ):
        for one in results:
            rows.append(asdict(one))
            bar.update()


# --- processes of this machine ----------------------------------------------------------------------------------------

#: Reads from a pipe: +ID is a process group to kill when the pipe ends, -ID one that has ended. So no trial outlives
#: the sweep, however it ends.
GUARD = """
import contextlib, os, signal, sys
groups = set()
for line in sys.stdin:
    (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
for group in groups:
    with contextlib.suppress(OSError):
        os.killpg(group, signal.SIGKILL)
"""


class Processes:
    """Runs jobs as processes. They are killed when this process ends, also by SIGKILL."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[bytes]] = set()
        self._stopped = False
        self._lock = threading.Lock()  # guards the two above, and the order of lines to the guard
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", GUARD], stdin=subprocess.PIPE, start_new_session=True
        )

    def run(self, job: Job, *, cwd: Path | None = None) -> Ended | None:
        """Run one job in `cwd` to its end; None when the processes were stopped before or during it."""
        words = command_of(job.trial, job.command, job.folder)
        folder = (cwd or Path()) / job.folder
        write_text(folder / "command.txt", hide_credentials(shlex.join(words)) + "\n")
        began = time.monotonic()
        with (folder / "stdout.txt").open("wb") as out, (folder / "stderr.txt").open("wb") as err:
            environ = {**os.environ, "QM_TRIAL_DIR": str(job.folder)}
            try:
                process = self._start(words, stdout=out, stderr=err, env=environ, cwd=cwd)
            except OSError as error:
                return ended(job.trial, "failed", 127, 0.0, f"{words[0]}: {error.strerror}")
            if process is None:
                return None
            timed_out = _wait(process, job.timeout_s)
        with self._lock:
            self._running.discard(process)
            self._tell_guard(f"-{process.pid}")
            if self._stopped:
                return None
        status: Status = "timed out" if timed_out else "done" if process.returncode == 0 else "failed"
        text = (folder / "stderr.txt").read_text(encoding="utf-8", errors="replace").strip()
        says = text.rpartition("\n")[2].strip()[:300]
        return ended(job.trial, status, process.returncode, time.monotonic() - began, says)

    def stop(self) -> None:
        """Terminate all processes; idempotent."""
        with self._lock:
            self._stopped = True
            running = list(self._running)
        for process in running:
            _signal(process, signal.SIGTERM)

    def close(self) -> None:
        """End the guard, which kills what still runs."""
        with contextlib.suppress(OSError):
            self._guard.communicate()

    def _start(self, words: Sequence[str], **settings: Any) -> subprocess.Popen[bytes] | None:
        with self._lock:
            if self._stopped:
                return None
            process = subprocess.Popen(words, start_new_session=True, **settings)
            self._running.add(process)
            self._tell_guard(f"+{process.pid}")
            return process

    def _tell_guard(self, line: str) -> None:
        assert self._guard.stdin is not None
        with contextlib.suppress(OSError):  # a guard that was killed
            self._guard.stdin.write(line.encode() + b"\n")
            self._guard.stdin.flush()


class LocalEngine:
    """Runs `slots` jobs at a time on this machine."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._processes: Processes | None = None

    def run(self, jobs: Sequence[Job]) -> Generator[Ended]:
        """Run jobs; yield how each ended. A failed job does not stop the others."""
        if not jobs:
            return
        self._processes = processes = Processes()
        with contextlib.closing(processes), ThreadPoolExecutor(self.slots, "qm-sweep") as pool:
            futures = [pool.submit(processes.run, job) for job in jobs]
            try:
                for future in as_completed(futures):
                    if found := future.result():
                        yield found
            finally:
                processes.stop()
                pool.shutdown(cancel_futures=True)

    def stop(self) -> None:
        """Terminate all processes; idempotent."""
        if self._processes is not None:
            self._processes.stop()


def _wait(process: subprocess.Popen[bytes], timeout_s: float | None) -> bool:
    """Wait for the end of a process; return whether it timed out."""
    try:
        process.wait(timeout_s)
        return False
    except subprocess.TimeoutExpired:
        _signal(process, signal.SIGTERM)
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            _signal(process, signal.SIGKILL)
            process.wait()
        return True


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Signal a process and everything it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
