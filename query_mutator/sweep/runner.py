"""Trials side by side, each in a process of its own: what ended is kept, what failed is seen, what was done is skipped.

DIR/sweep.json                command and metric, so that a folder is not used for two sweeps
DIR/trials.jsonl              a row for each trial that ended: name, setting, seed, status, exit code, seconds
DIR/trials/NAME/              what the trial wrote; stdout.txt and stderr.txt among it
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from query_mutator.cli.console import closing_on_interrupt, progress
from query_mutator.errors import UsageError
from query_mutator.files import JsonLines, disk_errors, read_json_lines
from query_mutator.sweep.plan import Setting, Trial, command_of

Status = Literal["done", "failed", "timed out"]

_GRACE_S = 5.0  # between asking a process to end and ending it


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


class SweepFolder:
    """The folder of a sweep, which can be gone on with."""

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        """Open or make the folder; UsageError when it belongs to another command."""
        self.path = path
        with disk_errors(path):
            (path / "trials").mkdir(parents=True, exist_ok=True)
        file = path / "sweep.json"
        if file.exists():
            before = json.loads(file.read_text(encoding="utf-8"))
            if before != dict(about):
                raise UsageError(
                    f"{path} holds a sweep of another command ({before.get('command')}); choose another --dir"
                )
        else:
            with disk_errors(file):
                file.write_text(json.dumps(dict(about), indent=2) + "\n", encoding="utf-8")

    def folder_of(self, trial: Trial) -> Path:
        """Return where a trial writes."""
        return self.path / "trials" / trial.name

    def ended(self) -> dict[str, Ended]:
        """Return the last end of each trial so far."""
        file = self.path / "trials.jsonl"
        return {row["name"]: Ended(**row) for row in read_json_lines(file)} if file.exists() else {}


class Runner:
    """Runs trials of a command, `jobs` at a time."""

    def __init__(self, folder: SweepFolder, command: Sequence[str], *, jobs: int, timeout_s: float | None) -> None:
        self.folder, self.command, self.jobs, self.timeout_s = folder, tuple(command), jobs, timeout_s
        self._running: set[subprocess.Popen[bytes]] = set()
        self._stopped = False
        self._lock = threading.Lock()  # guards the two above

    def run(self, trials: Sequence[Trial], *, retry_failed: bool = False) -> dict[str, Ended]:
        """Run the trials that have not ended well yet; return how each ended. The first failure stops nothing."""
        before = self.folder.ended()
        missing = [
            trial
            for trial in trials
            if trial.name not in before or (retry_failed and before[trial.name].status != "done")
        ]
        rows = JsonLines(self.folder.path / "trials.jsonl")
        with ThreadPoolExecutor(self.jobs, "qm-sweep") as pool, closing_on_interrupt(self.stop):
            futures = [pool.submit(self._run_one, trial) for trial in missing]
            try:
                with progress("sweep", len(missing), unit="trial") as bar:
                    for future in as_completed(futures):
                        ended = future.result()
                        if ended is not None:
                            rows.append(asdict(ended))
                        bar.update()
            finally:
                self.stop()
                pool.shutdown(cancel_futures=True)
                rows.close()
        ended_now = self.folder.ended()
        self._stopped = False
        return {trial.name: ended_now[trial.name] for trial in trials if trial.name in ended_now}

    def stop(self) -> None:
        """End all processes; idempotent."""
        with self._lock:
            self._stopped = True
            running = list(self._running)
        for process in running:
            _end(process, signal.SIGTERM)

    def _run_one(self, trial: Trial) -> Ended | None:
        """Run one trial to its end; None when the sweep was stopped before or during it."""
        folder = self.folder.folder_of(trial)
        words = command_of(trial, self.command, folder)
        began = time.monotonic()
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "command.txt").write_text(shlex.join(words) + "\n", encoding="utf-8")
        with (folder / "stdout.txt").open("wb") as out, (folder / "stderr.txt").open("wb") as err:
            process = self._start(words, folder, out, err)
            if process is None:
                return None
            if isinstance(process, OSError):
                return _ended(trial, "failed", 127, 0.0, f"{words[0]}: {process.strerror}")
            timed_out = self._wait(process)
        with self._lock:
            self._running.discard(process)
            if self._stopped:
                return None
        status: Status = "timed out" if timed_out else "done" if process.returncode == 0 else "failed"
        return _ended(trial, status, process.returncode, time.monotonic() - began, _last_line(folder / "stderr.txt"))

    def _start(
        self, words: Sequence[str], folder: Path, out: Any, err: Any
    ) -> subprocess.Popen[bytes] | OSError | None:
        environ = {**os.environ, "QM_TRIAL_DIR": str(folder)}
        with self._lock:
            if self._stopped:
                return None
            try:
                process = subprocess.Popen(words, stdout=out, stderr=err, env=environ, start_new_session=True)
            except OSError as error:
                return error
            self._running.add(process)
            return process

    def _wait(self, process: subprocess.Popen[bytes]) -> bool:
        """Wait for the end of a process; return whether its time ran out."""
        try:
            process.wait(self.timeout_s)
            return False
        except subprocess.TimeoutExpired:
            _end(process, signal.SIGTERM)
            try:
                process.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                _end(process, signal.SIGKILL)
                process.wait()
            return True


def _end(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Signal a process and all it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _ended(trial: Trial, status: Status, exit_code: int, wall_s: float, says: str) -> Ended:
    return Ended(
        name=trial.name,
        setting=dict(trial.setting),
        seed=trial.seed,
        status=status,
        exit_code=exit_code,
        wall_s=round(wall_s, 2),
        says="" if status == "done" else says,
    )


def _last_line(path: Path) -> str:
    lines = [line.strip() for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""
