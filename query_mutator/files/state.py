"""Whether a run is running, finished, interrupted or killed, from the files of its folder."""

from __future__ import annotations

import contextlib
import math
import os
import socket
from collections.abc import Collection
from pathlib import Path
from typing import Literal

from query_mutator.files import LOCK, decode_object
from query_mutator.files.metrics import METRICS_FILE
from query_mutator.files.run_dir import SUMMARY

__all__ = ["RunState", "last_values", "run_state"]

RunState = Literal["running", "finished", "interrupted", "killed"]

_TAILS_BYTES = (1 << 16, 1 << 20)  # of metrics.jsonl: about 30 rows, else 500


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
    if done is None or _summarized_steps(folder / SUMMARY) < last_values(folder / METRICS_FILE, ["step"]).get(
        "step", 0
    ):
        return "interrupted"
    return "finished"


def _summarized_steps(path: Path) -> float:
    try:
        steps = decode_object(path.read_bytes()).get("env_steps")
    except (OSError, ValueError):
        return math.inf
    return steps if isinstance(steps, (int, float)) else math.inf


def last_values(path: Path, keys: Collection[str]) -> dict[str, float]:
    """Return the last number under each key in a metrics.jsonl; only the end of a long file is read."""
    found: dict[str, float] = {}
    for tail_bytes in _TAILS_BYTES:
        found, is_whole = _last_in_tail(path, keys, tail_bytes)
        if is_whole or len(found) == len(keys):
            break
    return found


def _last_in_tail(path: Path, keys: Collection[str], tail_bytes: int) -> tuple[dict[str, float], bool]:
    """Return the values of the keys in the last rows, and whether these are the whole file."""
    try:
        with path.open("rb") as file:
            start = max(0, os.fstat(file.fileno()).st_size - tail_bytes)
            file.seek(start)
            lines = file.read().splitlines()
    except OSError:
        return {}, True
    found: dict[str, float] = {}
    missing = {key: f'"{key}":'.encode() for key in keys}
    for line in reversed(lines):
        if any(mark in line for mark in missing.values()):
            with contextlib.suppress(ValueError):  # a line that was cut off
                row = decode_object(line)
                found |= {key: row[key] for key in missing if isinstance(row.get(key), (int, float))}
                missing = {key: mark for key, mark in missing.items() if key not in found}
        if not missing:
            break
    return found, start == 0


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
