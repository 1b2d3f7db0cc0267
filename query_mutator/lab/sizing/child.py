"""Measure in a child process, so that memory that leaks or runs out harms nothing else.

run_child("package.module:function", task)  ->  python -m query_mutator.lab.sizing.child TARGET TASK  ->  JSON
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from query_mutator.errors import UsageError

__all__ = ["load_target", "run_child"]

TIMEOUT_S = 120.0
_ERROR = "usage_error"  # key of a result that is an error message


def run_child(target: str, task: dict[str, Any], *, what: str, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
    """Return the JSON result of `target(**task)` in a child process; UsageError if it fails or takes too long.

    `what` names the task in error messages. The child is killed with all processes that it started.
    """
    root = str(Path(__file__).resolve().parents[3])  # importable in the child wherever the command runs
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    child = subprocess.Popen(
        [sys.executable, "-m", __name__, target, json.dumps(task)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    try:
        out, err = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise UsageError(f"{what}: no result within {timeout_s:.0f} s") from None
    finally:
        _kill(child)
    if child.returncode != 0:
        lines = [line for line in err.splitlines() if line.strip()] or [f"exit code {child.returncode}"]
        raise UsageError(f"{what} failed: {lines[-1]}")
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    if _ERROR in found:
        raise UsageError(found[_ERROR])
    return found


def load_target(name: str) -> Any:
    """Return the object `package.module:name`, looked up in the working directory too; UsageError if there is none."""
    module, _, attribute = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:  # an installed command has its own directory there instead
        sys.path.insert(0, here)
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"{name}: {error}; give package.module:function") from None


def _kill(child: subprocess.Popen[str]) -> None:
    """Kill a process and the workers it may have left."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    child.wait()


def _main() -> None:
    target, task = sys.argv[1:]
    try:
        found = load_target(target)(**json.loads(task))
    except UsageError as error:
        found = {_ERROR: str(error)}
    print(json.dumps(found))


if __name__ == "__main__":
    _main()
