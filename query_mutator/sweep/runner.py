"""Trials in parallel processes: finished trials are skipped on a rerun, failures are recorded.

DIR/sweep.json                the command, so that a folder is not used for two sweeps
DIR/trials.jsonl              a row for each trial that ended: name, setting, seed, status, exit code, seconds
DIR/trials/NAME/              what the trial wrote, with command.txt, stdout.txt and stderr.txt
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from query_mutator.cli.console import closing_on_interrupt, progress
from query_mutator.errors import UsageError, hide_credentials
from query_mutator.files import read_checked_json, write_checked_json, write_text
from query_mutator.runs.json_lines import JsonLines, read_json_lines
from query_mutator.sweep.config import SweepFlags
from query_mutator.sweep.plan import Setting, Trial, command_of

__all__ = ["Ended", "Runner", "SweepFolder"]

Status = Literal["done", "failed", "timed out"]

_GRACE_S = 5.0  # between SIGTERM and SIGKILL


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
    """The folder of a sweep. UsageError when it holds a sweep of another command."""

    def __init__(self, path: Path, *, command: str) -> None:
        self.path, self.rows_path = path, path / "trials.jsonl"
        file, about = path / "sweep.json", {"command": command}
        if not file.exists():
            write_checked_json(file, about)
        elif (before := read_checked_json(file)) != about:
            raise UsageError(f"{path} holds a sweep of another command ({before.get('command')}); choose another --out")

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


class Runner:
    """Runs trials of a command, `flags.jobs` at a time."""

    def __init__(self, folder: SweepFolder, flags: SweepFlags) -> None:
        self.folder, self.flags = folder, flags
        self._running: set[subprocess.Popen[bytes]] = set()
        self._stopped = False
        self._lock = threading.Lock()  # guards the two above

    def run(self, trials: Sequence[Trial], *, retry_failed: bool = False) -> dict[str, Ended]:
        """Run the trials that have not ended yet; return how each ended. A failed trial does not stop the others."""
        before = self.folder.ended()
        missing = [
            trial
            for trial in trials
            if trial.name not in before or (retry_failed and before[trial.name].status != "done")
        ]
        self._stopped = False
        rows = JsonLines(self.folder.rows_path)
        with ThreadPoolExecutor(self.flags.jobs, "qm-sweep") as pool, closing_on_interrupt(self.stop):
            futures = [pool.submit(self._run_one, trial) for trial in missing]
            try:
                with progress("sweep", len(missing), unit="trial") as bar:
                    for future in as_completed(futures):
                        if ended := future.result():
                            rows.append(asdict(ended))
                        bar.update()
            finally:
                self.stop()
                pool.shutdown(cancel_futures=True)
                rows.close()
        ended_now = self.folder.ended()
        return {trial.name: ended_now[trial.name] for trial in trials if trial.name in ended_now}

    def stop(self) -> None:
        """Terminate all processes; idempotent."""
        with self._lock:
            self._stopped = True
            running = list(self._running)
        for process in running:
            _signal(process, signal.SIGTERM)

    def _run_one(self, trial: Trial) -> Ended | None:
        """Run one trial to its end; None when the sweep was stopped before or during it."""
        folder = self.folder.folder_of(trial)
        words = command_of(trial, self.flags.command, folder)
        write_text(folder / "command.txt", hide_credentials(shlex.join(words)) + "\n")
        began = time.monotonic()
        with (folder / "stdout.txt").open("wb") as out, (folder / "stderr.txt").open("wb") as err:
            try:
                process = self._start(words, folder, out, err)
            except OSError as error:
                return _ended(trial, "failed", 127, 0.0, f"{words[0]}: {error.strerror}")
            if process is None:
                return None
            timed_out = self._wait(process)
        with self._lock:
            self._running.discard(process)
            if self._stopped:
                return None
        status: Status = "timed out" if timed_out else "done" if process.returncode == 0 else "failed"
        return _ended(trial, status, process.returncode, time.monotonic() - began, _last_line(folder / "stderr.txt"))

    def _start(self, words: Sequence[str], folder: Path, out: Any, err: Any) -> subprocess.Popen[bytes] | None:
        environ = {**os.environ, "QM_TRIAL_DIR": str(folder)}
        with self._lock:
            if self._stopped:
                return None
            # A session per trial, so that a signal reaches everything the trial started.
            process = subprocess.Popen(words, stdout=out, stderr=err, env=environ, start_new_session=True)
            self._running.add(process)
            return process

    def _wait(self, process: subprocess.Popen[bytes]) -> bool:
        """Wait for the end of a process; return whether it timed out."""
        try:
            process.wait(self.flags.timeout_min * 60 if self.flags.timeout_min else None)
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


def _ended(trial: Trial, status: Status, exit_code: int, wall_s: float, says: str) -> Ended:
    return Ended(
        name=trial.name,
        setting=trial.setting,
        seed=trial.seed,
        status=status,
        exit_code=exit_code,
        wall_s=round(wall_s, 2),
        says="" if status == "done" else says,
    )


def _last_line(path: Path) -> str:
    lines = [line.strip() for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""
