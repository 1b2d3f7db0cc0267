"""The embedded server in a process of its own, for measurements that must not share its interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from query_mutator.errors import BackendError

__all__ = ["embedded_process"]


@contextmanager
def embedded_process(model: str, *, num_parallel: int, latency_ms: float, latency_sigma: float) -> Iterator[str]:
    """Yield the address of an embedded server with one model; BackendError if it does not start."""
    flags = ["--num-parallel", num_parallel, "--latency-ms", latency_ms, "--latency-sigma", latency_sigma]
    command = [sys.executable, "-m", "query_mutator.embedded", "--port", "0", "--model", model, *map(str, flags)]
    paths = filter(None, (str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH")))
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as process:
        assert process.stdout is not None
        try:
            greeting = process.stdout.readline().split()
            if not greeting:
                raise BackendError("the embedded server did not start")
            yield greeting[-1]
        finally:
            process.terminate()
