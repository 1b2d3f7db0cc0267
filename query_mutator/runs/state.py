"""Whether a run is running, finished, interrupted or killed, from the files of its folder."""

from __future__ import annotations

import contextlib
import math
import os
import socket
from pathlib import Path
from typing import Literal

from query_mutator.files import LOCK, decode_object
from query_mutator.runs.metrics import METRICS_FILE
from query_mutator.runs.run_dir import SUMMARY

__all__ = ["RunState", "run_state"]

RunState = Literal["running", "finished", "interrupted", "killed"]

_TAIL_BYTES = 1 << 16  # of metrics.jsonl: its last rows


def run_state(folder: Path) -> RunState:
    """Return the state of a run: its lock names the process that writes it, its summary is written last.

    A summary of fewer steps than the metrics have is that of an earlier part of the run. A process on another host
    cannot be checked and counts as running.
    """
    locked, done = _mtime(folder / LOCK), _mtime(folder / SUMMARY)
    if locked is not None:
        if done is not None and done >= locked:
            return "finished"
        return "running" if _may_be_alive(folder / LOCK) else "killed"
    if done is None or _summarized_steps(folder / SUMMARY) < _last_step(folder / METRICS_FILE):
        return "interrupted"
    return "finished"


def _summarized_steps(path: Path) -> float:
    try:
        steps = decode_object(path.read_bytes()).get("env_steps")
    except (OSError, ValueError):
        return math.inf
    return steps if isinstance(steps, (int, float)) else math.inf


def _last_step(path: Path) -> float:
    """Return the step of the last whole row of metrics.jsonl, 0 without one."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return 0.0
    for line in reversed(lines):
        with contextlib.suppress(ValueError):
            step = decode_object(line).get("step")
            return step if isinstance(step, (int, float)) else 0.0
    return 0.0


def _mtime(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _may_be_alive(lock: Path) -> bool:
    """Return whether the process that a lock names may be alive."""
    try:
        pid, host, *_ = [*lock.read_text(encoding="utf-8", errors="replace").splitlines(), "", ""]
        if host != socket.gethostname():
            return True
        os.kill(int(pid), 0)
    except (ProcessLookupError, FileNotFoundError):
        return False
    except (OSError, ValueError):  # another user's process, a lock that is just being written
        return True
    return True
