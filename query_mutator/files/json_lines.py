"""JSON-lines files whose rows have a checksum: append rows, read them, verify them.

{"step": 1, ..., "crc": "0a1b2c3d"}     CRC-32 of the row before that entry
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from query_mutator.errors import UsageError, disk_errors
from query_mutator.files import decode_object, encode

_CRC = b',"crc":"'  # then eight hexadecimal digits and `"}`: the last entry of a row of a JSON-lines file
_CRC_BYTES = len(_CRC) + 10
_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)
_APPEND |= getattr(os, "O_NOFOLLOW", 0)  # a link in a stranger's run folder may lead anywhere


class JsonLines:
    """Append rows to a file, one JSON object per line. `cut_at` first truncates the file to that many bytes.

    The last entry of a row, `crc`, is the CRC-32 of the row before that entry. Opening a file verifies the rows that
    stay, and drops a last line that was cut off. Thread-safe. Raises DiskError when the file cannot be written,
    UsageError for damaged rows.
    """

    def __init__(self, path: Path, *, cut_at: int | None = None) -> None:
        """Open a file; DiskError for a symbolic link."""
        self.path = path
        self._lock = threading.Lock()  # guards the order of rows
        end = max((at for _, at in _scan(path, end=cut_at)), default=0) if path.exists() else 0
        with disk_errors(path):
            self._file = os.fdopen(os.open(path, _APPEND, 0o666), "ab", buffering=0)
            self._file.truncate(end)
            if end and not _ends_a_line(path):
                self._file.write(b"\n")

    def append(self, *rows: Mapping[str, Any]) -> None:
        """Write rows and hand them to the operating system."""
        bodies = [encode(row)[:-1] for row in rows]
        left = b"".join(b'%b%b%08x"}\n' % (body, _CRC, zlib.crc32(body)) for body in bodies)
        with self._lock:
            size = os.fstat(self._file.fileno()).st_size
            try:
                while left:
                    left = left[self._file.write(left) :]
            except OSError as error:
                with contextlib.suppress(OSError):
                    self._file.truncate(size)  # half a row would stand before the next one
                with disk_errors(self.path):
                    raise error from None

    @property
    def size_bytes(self) -> int:
        """Return the length of the file."""
        return self.path.stat().st_size

    def sync(self) -> None:
        """Sync all rows to disk."""
        with disk_errors(self.path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; idempotent. Every row is flushed already, so every error has been reported."""
        with contextlib.suppress(OSError):
            self._file.close()


def _ends_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"


def read_json_lines(path: str | Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file in order; skip a last line that was cut off.

    Raises a UsageError `file:line: ...` for damage of any other kind. Rows of other programs have no checksum.
    """
    return (row for row, _ in _scan(path))


def check_json_lines(path: Path, *, end: int) -> None:
    """Raise a UsageError unless the first `end` bytes of a file are whole rows."""
    for _ in _scan(path, end=end):
        pass


def _scan(path: str | Path, *, end: int | None = None) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield the rows of the first `end` bytes of a file, each with the offset behind its line."""
    at, number = 0, 0
    has_crc: bool | None = None  # as the first row
    try:
        with Path(path).open("rb") as file:
            for number, line in enumerate(file, 1):
                if end is not None and at >= end:
                    break
                try:
                    value, has_crc = _parse_line(line, has_crc=has_crc)
                except ValueError as error:
                    if _is_cut_off(line, is_last=not file.peek(1)):
                        break
                    raise UsageError(f"{path}:{number}: {error}") from None
                at += len(line)
                yield value, at
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from None
    if end is not None and at != end:
        raise UsageError(f"{path}:{number}: damaged, its whole lines take {at:,} bytes and not {end:,}")


def _parse_line(line: bytes, *, has_crc: bool | None) -> tuple[dict[str, Any], bool]:
    """Return the row of a line, and whether it has a checksum: all rows of a file have one, or none has."""
    body = line.removesuffix(b"\n")
    row, stored = body[:-_CRC_BYTES], body[-10:-2]
    is_checked = body[-_CRC_BYTES:-10] == _CRC and body.endswith(b'"}')
    if has_crc not in (None, is_checked):
        raise ValueError(f"damaged, it has {'a' if is_checked else 'no'} checksum")
    if not is_checked:
        return decode_object(body), False
    if b"%08x" % zlib.crc32(row) != stored:
        raise ValueError("damaged, it does not match its checksum")
    return decode_object(row + b"}"), True


def _is_cut_off(line: bytes, *, is_last: bool) -> bool:
    """Return whether a process or the machine stopped while it wrote this line; some file systems leave zeros."""
    if not line.strip(b"\0\n"):
        return is_last
    return not line.endswith(b"\n") and not re.search(rb',"crc":"[0-9a-f]{8}"}.?\Z', line, re.DOTALL)
