"""What a folder of run folders holds: one line per run, from the small files and the end of the metrics."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from query_mutator.errors import UsageError
from query_mutator.files import LOCK, decode_object
from query_mutator.files.metrics import METRICS_FILE
from query_mutator.files.run_dir import SUMMARY, last_values, run_state

_CONFIG = "config.json"
_RUN_FILES = (_CONFIG, METRICS_FILE, SUMMARY, LOCK)
_FIGURES = ("step", "validation/success", "llm/calls")


def list_runs(folder: Path) -> list[dict[str, Any]]:
    """Return the runs in a folder, the newest last, or the one run that it is; UsageError if it is not a folder.

    None is what the files of a run do not say; `started` is in seconds since 1970. A run that ended before
    its first step or plan is left out.
    """
    try:
        names = set(os.listdir(folder))
    except OSError as error:
        raise UsageError(
            f"{folder}: {error.strerror}; give the folder of run folders (--save-dir of the runs)"
        ) from None
    if _CONFIG in names:
        return [_listed(folder)]
    paths = [folder / name for name in names]
    runs = [_listed(path) for path in paths if not path.is_symlink() and _is_run(path)]
    return sorted(runs, key=lambda run: (run["started"], run["name"]))


def _is_run(path: Path) -> bool:
    """Return whether a folder is that of a run which holds something, or still may."""
    is_run = any((path / name).exists() for name in _RUN_FILES)
    return is_run and (not _is_empty(path) or run_state(path) == "running")


def _is_empty(path: Path) -> bool:
    """Return whether a run folder has neither a row nor a result."""
    rows = [path / name for name in ("transcripts.jsonl", METRICS_FILE)]
    has_rows = any(row.exists() and row.stat().st_size for row in rows)
    return (path / "resume.pt").exists() and not has_rows and not (path / SUMMARY).exists()


def _listed(path: Path) -> dict[str, Any]:
    config, summary = _read(path / _CONFIG), _read(path / SUMMARY)
    flags, state = config.get("flags"), run_state(path)
    figures = last_values(path / METRICS_FILE, _FIGURES)
    report = summary if state == "finished" else {}  # that of an earlier part of a resumed run says nothing
    calls = _number(report, "llm_calls")
    if calls is not None:
        calls += _number(report, "eval_llm_calls") or 0
    return {
        "name": path.resolve().name,
        "state": state,
        "started": _started(path, config),
        "steps": _whole(figures.get("step")),
        "steps_asked": steps_asked(flags if isinstance(flags, Mapping) else {}),
        "validation_success": figures.get("validation/success"),  # of the last periodic evaluation
        "held_out_success": _number(report, "eval", "methods", "policy", "success"),  # at the end
        "calls": _whole(figures.get("llm/calls") if calls is None else calls),  # that of the end included
    }


def _read(path: Path) -> dict[str, Any]:
    """Return the object in a file, {} if it is absent or damaged: a listing shows the other runs all the same."""
    with contextlib.suppress(OSError, ValueError):
        return decode_object(path.read_bytes())
    return {}


def _started(path: Path, config: Mapping[str, Any]) -> float:
    with contextlib.suppress(TypeError, ValueError):
        return datetime.fromisoformat(config.get("started", "")).timestamp()
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def steps_asked(flags: Mapping[str, Any]) -> int | None:
    """Return the steps of the run that was asked for: whole rollouts, as PPOConfig.total_steps has them."""
    steps, rollout = _number(flags, "num_env_steps"), 1.0
    for name in ("num_processes", "num_steps"):
        rollout *= _number(flags, name) or 1.0
    return None if steps is None else int(max(1, -(-steps // rollout)) * rollout)


def _number(data: Any, *keys: str) -> float | None:
    for key in keys:
        data = data.get(key) if isinstance(data, Mapping) else None
    return data if isinstance(data, (int, float)) else None


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
