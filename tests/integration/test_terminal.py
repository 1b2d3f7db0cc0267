"""The bar of a training on real terminals of several widths: nothing wraps."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from query_mutator.testing import StubServer, start_server
from tests.conftest import Librarian, Softener

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def server() -> Iterator[StubServer]:
    with start_server([Librarian(), Softener()], num_parallel=4, latency_ms=30) as started:
        yield started


def shown_in_terminal(argv: list[str], *, columns: int, cwd: Path) -> list[str]:
    """Return what a process drew on a terminal, split where the cursor returns to the first column."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environ = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    environ |= {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}
    process = subprocess.Popen(argv, cwd=cwd, env=environ, stdout=subprocess.DEVNULL, stderr=theirs)
    os.close(theirs)
    text = b""
    with contextlib.suppress(OSError):  # the end, on Linux
        while part := os.read(ours, 65536):
            text += part
    os.close(ours)
    assert process.wait(timeout=60) == 0, text.decode()
    return re.split(r"[\r\n]|\x1b\[A", text.decode())


@pytest.mark.slow
@pytest.mark.parametrize("columns", [80, 60, 40])
def test_no_line_of_the_bar_wraps(tiny_flags: list[str], server: StubServer, tmp_path: Path, columns: int) -> None:
    flags = [server.url if word.startswith("http") else word for word in tiny_flags]
    flags += ["--num-env-steps", "128", "--no-evaluate", "--eval-interval", "1"]
    argv = [sys.executable, str(ROOT / "train_query_mutator.py"), *flags]
    lines = shown_in_terminal(argv, columns=columns, cwd=tmp_path)
    bars = [line for line in lines if re.search(r"\d%", line)]
    assert bars
    assert max(map(len, bars)) < columns
    ours = [line for line in bars if " left" in line]
    names = {80: ("valid", "return", "calls/s", "limit", "failed"), 60: ("valid", "return"), 40: ("valid",)}[columns]
    assert any(all(name in line for name in names) for line in ours), ours


def test_without_a_terminal_lines_are_plain(tiny_flags: list[str], tmp_path: Path) -> None:
    argv = [sys.executable, str(ROOT / "train_query_mutator.py"), *tiny_flags, "--no-evaluate"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(argv, cwd=tmp_path, env=environ, capture_output=True, text=True, check=True, timeout=120)
    assert "\x1b" not in done.stderr
    assert "training" not in done.stderr  # it appears after five seconds
