"""Files that cannot be written: a full disk or a closed folder becomes one line that says what to do."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from query_mutator.errors import DiskError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_CLOSED = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ENOENT, errno.EEXIST)


def disk_advice(error: OSError) -> str | None:
    """Return what to do about a file that cannot be written, None for errors of another kind."""
    place = f"{error.filename}: " if error.filename else ""
    if error.errno in _FULL:
        return f"{place}the disk is full ({error.strerror}); free some space, or choose another place to write to"
    if error.errno in _CLOSED:
        return f"{place}cannot be written ({error.strerror}); choose another place to write to"
    return None


@contextmanager
def disk_errors(path: object) -> Iterator[None]:
    """Turn the operating system's refusal to write `path` into a DiskError."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        advice = disk_advice(error)
        if advice is None:
            raise
        raise DiskError(advice) from error
