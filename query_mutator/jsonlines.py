"""Files of one JSON object a line: appended and flushed row by row, read with a torn last line tolerated."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from query_mutator.disk import disk_errors
from query_mutator.errors import UsageError
from query_mutator.json_text import encode


class JsonLines:
    """Appends rows to a file; `cut_at` first drops what stands behind that many bytes. DiskError when it cannot.

    Several threads may append.
    """

    def __init__(self, path: Path, *, cut_at: int | None = None) -> None:
        self.path = path
        self._lock = threading.Lock()  # guards the file, which holds a row until it is flushed
        with disk_errors(path):
            self._file = path.open("ab")
            if cut_at is not None:  # never longer than it is: that would fill it up with zeros
                self._file.truncate(min(cut_at, path.stat().st_size))

    def append(self, *rows: Mapping[str, Any]) -> None:
        """Write rows; they are with the operating system when this returns."""
        with disk_errors(self.path), self._lock:
            self._file.write(b"".join([encode(row) + b"\n" for row in rows]))
            self._file.flush()

    @property
    def size_bytes(self) -> int:
        """Return the length of the file."""
        return self.path.stat().st_size

    def sync(self) -> None:
        """Have every row on the disk itself."""
        with disk_errors(self.path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; idempotent. Every row was flushed, so what could still fail has been reported."""
        with contextlib.suppress(OSError):
            self._file.close()


def read_json_lines(path: str | Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file in order; a torn last line is skipped, any other is a UsageError `file:line: ...`."""
    text = Path(path).read_text(encoding="utf-8")
    lines = text.removesuffix("\n").split("\n") if text else []  # splitlines would cut at U+2028 within a text
    for number, line in enumerate(lines, 1):
        try:
            yield json.loads(line)
        except ValueError as error:
            if number < len(lines):
                raise UsageError(f"{path}:{number}: not JSON ({error})") from None
