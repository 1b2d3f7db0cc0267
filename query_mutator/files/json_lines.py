"""JSON-lines files whose rows have a chained checksum: append rows, read them, verify them.

{"step": 1, ..., "crc": "0a1b2c3d"}     CRC-32 of the row, continued from the row above
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from query_mutator.errors import UsageError, disk_errors
from query_mutator.files import decode_object, encode

_CRC = b',"crc":"'  # then eight hexadecimal digits and `"}`: the last entry of a row of a JSON-lines file
_CRC_BYTES = len(_CRC) + 10
_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)
_APPEND |= getattr(os, "O_NOFOLLOW", 0)  # a link in a stranger's run folder may lead anywhere
#: Checksums of their rows start with the name: no two can be exchanged.
_NAMED = ("metrics.jsonl", "transcripts.jsonl", "evaluation.jsonl")


class JsonLines:
    """Append rows to a file, one JSON object per line. `cut_at` first truncates the file to that many bytes.

    The last entry of a row, `crc`, is the CRC-32 of the row before that entry, continued from the row above: it also
    finds rows that were exchanged, removed or repeated. Opening a file verifies the rows that stay, and drops a last
    line that was cut off. Thread-safe. Raises DiskError when the file cannot be written, UsageError for damaged rows.
    """

    def __init__(self, path: Path, *, cut_at: int | None = None) -> None:
        """Open a file; DiskError for a symbolic link."""
        self.path = path
        self._lock = threading.Lock()  # guards the checksum and the order of rows
        self.crc, end = _starts(path)[0], 0  # the checksum of the last row depends on all rows
        if path.exists():
            for row in scan_json_lines(path, end=cut_at):
                self.crc, end = row.crc, row.end
        with disk_errors(path):
            self._file = os.fdopen(os.open(path, _APPEND, 0o666), "ab", buffering=0)
            self._file.truncate(end)
            if end and not _ends_a_line(path):
                self._file.write(b"\n")

    def append(self, *rows: Mapping[str, Any]) -> None:
        """Write rows and hand them to the operating system."""
        bodies = [encode(row)[:-1] for row in rows]
        with self._lock:
            crc, lines = self.crc, []
            for body in bodies:
                crc = zlib.crc32(body, crc)
                lines.append(b'%b%b%08x"}\n' % (body, _CRC, crc))
            size = os.fstat(self._file.fileno()).st_size
            try:
                left = b"".join(lines)
                while left:
                    left = left[self._file.write(left) :]
            except OSError as error:
                with contextlib.suppress(OSError):
                    self._file.truncate(size)  # half a row would stand before the next one
                with disk_errors(self.path):
                    raise error from None
            self.crc = crc

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


class JsonRow(NamedTuple):
    """A row of a JSON-lines file, the offset behind its line, its checksum, and whether the file has it."""

    value: dict[str, Any]
    end: int
    crc: int
    is_checked: bool


def read_json_lines(path: str | Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file in order, as `scan_json_lines` does."""
    return (row.value for row in scan_json_lines(path))


def scan_json_lines(path: str | Path, *, end: int | None = None, after: JsonRow | None = None) -> Iterator[JsonRow]:
    """Yield the rows of a file in order, those of the first `end` bytes; skip a last line that was cut off.

    `after` is a row that an earlier scan of the file yielded: later rows are read, and their lines counted from it.
    Raises a UsageError `file:line: ...` for damage of any other kind. Rows of older versions and of other programs have
    no checksum.
    """
    at, number, starts = (after.end if after else 0), 0, _starts(path)
    crc = after.crc if after and after.is_checked else None
    try:
        with Path(path).open("rb") as file:
            file.seek(at)
            for number, line in enumerate(file, 1):
                if end is not None and at >= end:
                    break
                try:
                    value, crc = _parse_line(line, starts if crc is None else (crc,), has_crc=crc is not None)
                except ValueError as error:
                    if _is_cut_off(line, is_last=not file.peek(1)):
                        break
                    raise UsageError(f"{path}:{number}: {error}") from None
                at += len(line)
                yield JsonRow(value, at, starts[0] if crc is None else crc, crc is not None)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from None
    if end is not None and at != end:
        raise UsageError(f"{path}:{number}: damaged, its whole lines take {at:,} bytes and not {end:,}")


def check_json_lines(path: Path, *, end: int, crc: int | None) -> None:
    """Raise a UsageError unless the first `end` bytes of a file are whole rows, the last with the checksum `crc`."""
    found = _starts(path)[0]
    for row in scan_json_lines(path, end=end):
        found = row.crc
    if crc not in (None, found):
        raise UsageError(f"{path}: its first {end:,} bytes are not the rows that were written there")


def _starts(path: str | Path) -> tuple[int, ...]:
    """Return the checksums that rows may start from; a copy under another name may be of any file."""
    names = (name,) if (name := Path(path).name) in _NAMED else ("", *_NAMED)
    return tuple(zlib.crc32(name.encode()) for name in names)


def _parse_line(line: bytes, before: Sequence[int], *, has_crc: bool) -> tuple[dict[str, Any], int | None]:
    """Return the row of a line and its checksum, None without one; the line above has one of the checksums `before`."""
    body = line.removesuffix(b"\n")
    row, stored = body[:-_CRC_BYTES], body[-10:-2]
    if body[-_CRC_BYTES:-10] != _CRC or not body.endswith(b'"}'):
        if has_crc:
            raise ValueError("damaged, it has no checksum")
        return decode_object(body), None
    crc = next((crc for crc in (zlib.crc32(row, start) for start in before) if b"%08x" % crc == stored), None)
    if crc is None:
        raise ValueError("damaged, it does not match its checksum")
    return decode_object(row + b"}"), crc


def _is_cut_off(line: bytes, *, is_last: bool) -> bool:
    """Return whether a process or the machine stopped while it wrote this line; some file systems leave zeros."""
    if not line.strip(b"\0\n"):
        return is_last
    return not line.endswith(b"\n") and not re.search(rb',"crc":"[0-9a-f]{8}"}.?\Z', line, re.DOTALL)
