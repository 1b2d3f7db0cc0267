"""Processes that tests start can be interrupted, and end with the session."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

SESSION = """
import os, signal, subprocess, sys
from tests import children

children.bind_to_this_process()
sleeper = "import signal, time; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler, flush=True)"
child = subprocess.Popen([sys.executable, "-c", sleeper + "; time.sleep(600)"], start_new_session=True)
print(child.pid, flush=True)
input()
os.kill(os.getpid(), signal.SIGKILL)
"""


def ignore_sigint() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def is_running(pid: str) -> bool:
    """Return whether a process exists and is no zombie, which a container may keep."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes in /proc")
def test_children_of_a_session_that_is_killed_end_and_can_be_interrupted() -> None:
    words, pipe = [sys.executable, "-c", SESSION], subprocess.PIPE
    with subprocess.Popen(words, cwd=ROOT, stdin=pipe, stdout=pipe, text=True, preexec_fn=ignore_sigint) as session:
        assert session.stdout is not None
        lines = [session.stdout.readline().strip(), session.stdout.readline().strip()]
        assert "True" in lines
        lines.remove("True")
        session.communicate("go on\n")
    gives_up_at = time.monotonic() + 30
    while is_running(lines[0]):
        assert time.monotonic() < gives_up_at
        time.sleep(0.05)
