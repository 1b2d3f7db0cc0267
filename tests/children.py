"""What processes that tests start have in common: SIGINT's default action, and an end with the test session.

A shell starts a background job with SIGINT ignored, which children inherit. And a session that is killed runs no
cleanup. So every child carries a mark in its environment, and a small process kills whoever has it once the session is
gone. It reads /proc; where that is missing, children end by themselves.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

_MARK = "QUERY_MUTATOR_TESTS"
_POLL_S = 0.5


def bind_to_this_process() -> None:
    """Give children that start from now on SIGINT's default action, and kill those that outlive this process."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # which is the default action after an exec
    os.environ[_MARK] = f"{os.getpid()}-{time.time_ns()}"
    if Path("/proc/self/environ").exists():
        words = [sys.executable, "-I", "-S", __file__, str(os.getpid()), os.environ[_MARK]]
        subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True)


def _kill_after(parent: int, mark: str) -> None:
    """Wait until `parent` has ended, then kill all processes with the mark, until no new one appears."""
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    while found := [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _has(pid, mark)]:
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_S)


def _has(pid: int, mark: str) -> bool:
    if pid == os.getpid():
        return False
    with contextlib.suppress(OSError):  # ended, or another user's
        return f"{_MARK}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False


if __name__ == "__main__":
    _kill_after(int(sys.argv[1]), sys.argv[2])
