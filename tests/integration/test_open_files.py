"""A run where few files may be open: it fits, or says at once how many calls would."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from query_mutator.llm.transport import error_from_exception

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


def train(flags: list[str], tmp_path: Path, *, soft: int, hard: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "train_query_mutator.py"), *flags],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard)),
    )


@pytest.mark.parametrize(("batch_size", "hard"), [(16, 64), (64, 1024)])
def test_a_run_that_fits_into_64_open_files_or_may_raise_them(
    batch_size: int, hard: int, tiny_flags: list[str], tmp_path: Path
) -> None:
    more = ["--batch-size", str(batch_size), "--num-processes", str(batch_size), "--num-env-steps", "128"]
    done = train([*tiny_flags, *more, "--eval-interval", "0"], tmp_path, soft=64, hard=hard)
    assert done.returncode == 0, done.stderr


def test_a_run_that_does_not_fit_names_the_batch_size_that_does(tiny_flags: list[str], tmp_path: Path) -> None:
    done = train([*tiny_flags, "--batch-size", "64", "--num-processes", "64"], tmp_path, soft=64, hard=64)
    assert done.returncode == 2
    assert "allow more with `ulimit -n 92`, or give --batch-size 36" in done.stderr
    assert "Traceback" not in done.stderr


def test_no_file_for_a_connection_is_not_a_server_that_is_away() -> None:
    error = error_from_exception(OSError(24, os.strerror(24)), url="http://here", timeout_s=1)
    assert error.kind == "server"
    assert "ulimit -n" in error.message
