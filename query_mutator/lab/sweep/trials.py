"""Trials from `--grid` and `--random`, and engines that run them: finished ones are skipped on a rerun.

--grid train_batch_size=64,128,256     the flag --train-batch-size takes each value
--grid validation_fold=0,1,2,3,4       repeats of each setting and seed: cross-fitting, averaged like seeds
--random lr=1e-4:1e-2                  sampled log-uniformly; integers where both ends are integers
{train_batch_size} {seed} {dir}        in the command are replaced by the value, and then no flag is added
{python}                               is replaced by the Python that runs the trial, on whichever machine

DIR/sweep.json                what is run, so that a folder is not used for two sweeps
DIR/trials.jsonl              a row for each trial that ended: name, setting, seed, status, exit code, seconds
DIR/trials/NAME/              what the trial wrote, with command.txt, stdout.txt and stderr.txt

`LocalEngine` runs trials as processes of this machine, each in a session, so that a signal reaches everything that a
trial started; `cluster.jobs.RayEngine` as Ray tasks.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import numpy as np
from cyclopts import Parameter

from ppo.fields import Ge, Le
from query_mutator.bounds import Retries, Threads
from query_mutator.cli.console import closing_on_interrupt, progress
from query_mutator.cli.outputs import OutputFlags
from query_mutator.errors import UsageError, hide_credentials
from query_mutator.files import JsonLines, read_checked_json, read_json_lines, write_checked_json, write_text
from query_mutator.lab.analysis.runs import number_or_text

__all__ = [
    "FOLD",
    "Ended",
    "Engine",
    "EngineFlags",
    "Job",
    "LocalEngine",
    "Processes",
    "Setting",
    "Status",
    "SweepFolder",
    "Trial",
    "Value",
    "command_of",
    "ended",
    "extended",
    "grid_settings",
    "is_sweep",
    "parse_grid",
    "parse_ranges",
    "random_settings",
    "run_trials",
    "trials_of",
]  # fmt: skip

Value = int | float | str
Setting = Mapping[str, Value]

FOLD = "validation_fold"  # a name in the grid that tells repeats apart, as seeds do
LONGEST_NAME = 200  # of a folder: most file systems take 255 bytes
_OUR_TRAINER = "train_query_mutator.py"  # or `qm train`, `python -m query_mutator train`
_OUR_PROGRAMS = {"qm", "query_mutator"}


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run of the command."""

    setting: Setting
    seed: int
    fold: Value | None = None

    @property
    def name(self) -> str:
        """Return a name that is valid as a folder name, with a digest where it does not say all."""
        whole = ",".join(f"{name}={value}" for name, value in {**self.setting, **self.repeat}.items())
        name = re.sub(r"[^\w=.,+-]", "_", whole)
        if name == whole and len(name) <= LONGEST_NAME:
            return name
        return f"{name[:LONGEST_NAME]}-{hashlib.sha256(whole.encode()).hexdigest()[:8]}"

    @property
    def repeat(self) -> Setting:
        """Return what tells the trial from the others of its setting."""
        return {**({} if self.fold is None else {FOLD: self.fold}), "seed": self.seed}


def parse_grid(items: Sequence[str]) -> dict[str, tuple[Value, ...]]:
    """Return the values of each name; UsageError for anything but NAME=VALUE,VALUE."""
    grid = {}
    for item in items:
        name, equals, values = item.partition("=")
        found = tuple(dict.fromkeys(number_or_text(text) for text in values.split(",") if text))
        if not (name and equals and found):
            raise UsageError(f"--grid {item}: write NAME=VALUE,VALUE, as train_batch_size=64,512")
        grid[_plain(name)] = found
    return grid


def parse_ranges(items: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Return low and high of each name; UsageError for anything but NAME=LOW:HIGH above 0."""
    ranges = {}
    for item in items:
        match = re.fullmatch(r"([^=]+)=([^:]+):([^:]+)", item)
        ends = [number_or_text(text) for text in match.groups()[1:]] if match else []
        if match is None or not all(isinstance(end, (int, float)) and end > 0 for end in ends) or ends[0] >= ends[1]:  # type: ignore[operator]
            raise UsageError(f"--random {item}: write NAME=LOW:HIGH with numbers above 0, as lr=1e-4:1e-2")
        ranges[_plain(match[1])] = (ends[0], ends[1])
    return ranges  # type: ignore[return-value]


def grid_settings(grid: Mapping[str, Sequence[Value]]) -> list[Setting]:
    """Return every combination of the values."""
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def random_settings(ranges: Mapping[str, tuple[float, float]], *, count: int) -> list[Setting]:
    """Return log-uniform samples; a larger count only adds to the same ones."""
    rng = np.random.default_rng(0)
    return [{name: _sampled(low, high, rng) for name, (low, high) in ranges.items()} for _ in range(count)]


def _sampled(low: float, high: float, rng: np.random.Generator) -> Value:
    value = math.exp(math.log(low) + float(rng.random()) * (math.log(high) - math.log(low)))
    return round(value) if isinstance(low, int) and isinstance(high, int) else float(f"{value:.4g}")


def extended(values: Sequence[Value], end: str) -> Value | None:
    """Return the value beyond an end of a grid, one step further in log space; None where there is none."""
    numbers = sorted(value for value in values if isinstance(value, (int, float)))
    if len(numbers) < 2:
        return None
    last, before = (numbers[-1], numbers[-2]) if end == "high" else (numbers[0], numbers[1])
    beyond = last * last / before
    whole = all(isinstance(value, int) for value in numbers)
    value: Value = max(1, round(beyond)) if whole else float(f"{beyond:.4g}")
    return None if value in values else value


def trials_of(
    settings: Sequence[Setting], seeds: Iterable[int], *, folds: Sequence[Value | None] = (None,)
) -> list[Trial]:
    """Return all trials, each once, the first seed of every setting before the second of any."""
    trials = [Trial(setting=setting, seed=seed, fold=fold) for seed in seeds for fold in folds for setting in settings]
    return list({trial.name: trial for trial in trials}.values())


def command_of(trial: Trial, command: Sequence[str], folder: Path) -> list[str]:
    """Return the command line of a trial; our own trainer also gets --save-dir."""
    flags: Setting = {**trial.setting, **trial.repeat}
    values: Setting = {**flags, "dir": str(folder), "python": sys.executable}
    words = [re.sub(r"\{(\w+)\}", lambda match: str(values.get(match[1], match[0])), word) for word in command]
    named = {name for word in command for name in re.findall(r"\{(\w+)\}", word)}
    for name, value in flags.items():
        if name not in named:
            words += [f"--{name.replace('_', '-')}", str(value)]
    if "dir" not in named and _is_our_trainer(command):
        words += ["--save-dir", str(folder)]
    return words


def _is_our_trainer(command: Sequence[str]) -> bool:
    names = [Path(word).name for word in command]
    starts = zip(names, names[1:], [*names[2:], ""], strict=False)
    as_command = any(one in _OUR_PROGRAMS and two == "train" and three != "sft" for one, two, three in starts)
    return as_command or _OUR_TRAINER in names


def _plain(name: str) -> str:
    return name.strip().removeprefix("--").replace("-", "_")


Status = Literal["done", "failed", "timed out"]
_Amount = Annotated[float, Ge(0), Le(10000)]
_GRACE_S = 5.0  # between SIGTERM and SIGKILL


def is_sweep(path: Path) -> bool:
    """Return whether a folder is that of a sweep."""
    return (path / "sweep.json").is_file()


@dataclass(frozen=True, kw_only=True)
class EngineFlags(OutputFlags):
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
    """Outcome of a trial."""

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
