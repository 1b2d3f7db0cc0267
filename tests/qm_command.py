"""`qm` in this process, and `qm serve` in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from query_mutator.cli.console import exit_code
from query_mutator.commands.main import main as qm_main

ROOT = Path(__file__).resolve().parents[1]


def qm(*argv: object) -> int:
    """Run a command line of `qm` and return its exit code."""
    return exit_code(qm_main, [str(word) for word in argv], prog="qm")


@contextmanager
def serving(run: Path, folder: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Run `qm serve RUN` with its files under `folder`; yield the process and its address."""
    command = [sys.executable, "-m", "query_mutator", "serve", str(run), "--port", "0", *flags]
    settings = {**os.environ, "HOME": str(folder), "TMPDIR": str(folder), "XDG_CACHE_HOME": str(folder)}
    with (folder / "log.txt").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=folder, env={**settings, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=log
        )
        try:
            assert process.stdout is not None
            line = process.stdout.readline().decode()
            assert line.startswith("listening on "), (folder / "log.txt").read_text(encoding="utf-8")
            yield process, line.split()[-1]
        finally:
            process.kill()
            process.wait(20)
            process.stdout.close()  # type: ignore[union-attr]
