"""Trials as processes of this machine, each in a session, so that a signal reaches everything that a trial started.

DIR/trials/NAME/command.txt, stdout.txt, stderr.txt
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from query_mutator.errors import hide_credentials
from query_mutator.files import write_text
from query_mutator.lab.sweep import guard
from query_mutator.lab.sweep.engines import Ended, Job, Status, ended
from query_mutator.lab.sweep.plan import command_of

__all__ = ["LocalEngine", "Processes"]

_GRACE_S = 5.0  # between SIGTERM and SIGKILL


class Processes:
    """Runs jobs as processes. They are killed when this process ends, also by SIGKILL."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[bytes]] = set()
        self._stopped = False
        self._lock = threading.Lock()  # guards the two above, and the order of lines to the guard
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__], stdin=subprocess.PIPE, start_new_session=True
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
        if not self._remove(process):
            return None
        status: Status = "timed out" if timed_out else "done" if process.returncode == 0 else "failed"
        says = _last_line(folder / "stderr.txt")
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

    def _remove(self, process: subprocess.Popen[bytes]) -> bool:
        """Forget a process that has ended; return whether it ended before `stop`."""
        with self._lock:
            self._running.discard(process)
            self._tell_guard(f"-{process.pid}")
            return not self._stopped

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


def _last_line(path: Path) -> str:
    lines = [line.strip() for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""
