"""Measurements in processes of their own: what one leaks, or takes too much of, harms no other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from query_mutator.errors import UsageError

ERROR_MARK = "qm-size-error "
TIMEOUT_S = 120.0


def run_child(module: str, task: dict[str, Any], *, what: str, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
    """Return the last line, as JSON, of `python -m MODULE TASK`; UsageError when it fails or takes too long.

    `what` says in an error's line what was being done. The process is ended with all that it started.
    """
    command = [sys.executable, "-m", module, json.dumps(task)]
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, env=_environment()
    )
    try:
        out, err = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise UsageError(f"{what}: no result within {timeout_s:.0f} s") from None
    finally:
        _end(child)
    if child.returncode != 0:
        lines = [line for line in err.splitlines() if line.strip()] or [f"exit code {child.returncode}"]
        marked = [line.removeprefix(ERROR_MARK) for line in lines if line.startswith(ERROR_MARK)]
        raise UsageError(marked[-1] if marked else f"{what} failed: {lines[-1]}")
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def _environment() -> dict[str, str]:
    """Return the environment with this package's folder on the path, wherever the command is run."""
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def _end(child: subprocess.Popen[str]) -> None:
    """End a process and the workers it may have left."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    child.wait()
