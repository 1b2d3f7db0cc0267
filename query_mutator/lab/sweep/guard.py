"""Kill the process groups of a process that has ended, however it ended: a script that reads from a pipe to it.

+ID     a group to kill at the end of the input
-ID     one that has ended
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterable

__all__ = ["kill_groups"]


def kill_groups(lines: Iterable[str]) -> None:
    """Read lines to their end, then kill the groups that are left."""
    groups: set[int] = set()
    for line in lines:
        (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    for group in groups:
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    kill_groups(sys.stdin)
