"""The lock on a folder that a process writes: a second process is refused, a dead owner's lock is taken over.

    FOLDER/lock     process id, host and start of the process, while it writes

`filelock` takes a lock over only with proof that its owner on this host is dead: no process has the id, or one that
started at another time. The owner of a lock from another host, or another container, cannot be checked.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from query_mutator.errors import UsageError
from query_mutator.files import LOCK, disk_errors

if TYPE_CHECKING:
    from filelock import SoftFileLock

_WAIT_S = 0.5  # a lock may just be written, and a takeover may need a second attempt


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, which is created, and removed again if nothing was written into it.

    Raises a UsageError while another process holds it; a DiskError when the lock cannot be written.
    """
    made = not folder.exists()
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = _acquired(folder)
    try:
        yield
    finally:
        lock.release()
        if made:
            with contextlib.suppress(OSError):
                folder.rmdir()


def _acquired(folder: Path) -> SoftFileLock:
    """Return the lock of a folder, held."""
    from filelock import SoftFileLock, Timeout  # takes 0.1 s

    lock = SoftFileLock(folder / LOCK, timeout=_WAIT_S, thread_local=False)
    try:
        lock.acquire()
    except Timeout as refused:
        _, is_elsewhere, owner = str(refused).partition("It is held by ")
        if not is_elsewhere:
            raise UsageError(
                f"{folder} is being written by process {lock.pid} on this host; wait for it, or stop it"
            ) from None
        raise UsageError(
            f"{folder} is being written by {owner.partition(',')[0]}, which cannot be checked from here; if it has "
            f"ended, delete {folder / LOCK}"
        ) from None
    return lock
