"""Follow files that another process writes: only what is new is read, and a file that was replaced is read again."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path
from typing import Any

from query_mutator.errors import UsageError
from query_mutator.files import read_checked_json
from query_mutator.files.json_lines import JsonRow, scan_json_lines

__all__ = ["FollowedJson", "FollowedRows"]

Stamp = tuple[int, int, int]


class FollowedRows:
    """The rows of a JSON-lines file that grows; a resumed run truncates it and writes other rows.

    `has_more` says that the last `read` reached its limit.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.has_more = False
        self._stamp: Stamp | None = None
        self._last: list[JsonRow] = []  # the last two rows read

    def read(self, *, limit: int) -> tuple[list[dict[str, Any]], bool]:
        """Return at most `limit` rows that are new, and whether they replace all rows before.

        Raises a UsageError for a damaged file.
        """
        stamp = _stamp(self.path)
        if stamp == self._stamp and not self.has_more:
            return [], False
        self._stamp, self.has_more = stamp, False
        if stamp is None:
            return [], self._forget()
        try:
            self._check_last()
            return self._next(limit), False
        except UsageError:
            is_reset = self._forget()
            return self._next(limit), is_reset

    def _check_last(self) -> None:
        """Raise a UsageError unless the last row read is still in its place."""
        if len(self._last) == 2:
            before, last = self._last
            found = next(scan_json_lines(self.path, after=before), None)
            if found is None or (found.end, found.crc) != (last.end, last.crc):
                raise UsageError(f"{self.path} was replaced")
        elif self._last and next(scan_json_lines(self.path), None) != self._last[0]:
            raise UsageError(f"{self.path} was replaced")

    def _next(self, limit: int) -> list[dict[str, Any]]:
        rows = list(islice(scan_json_lines(self.path, after=self._last[-1] if self._last else None), limit))
        self._last = [*self._last, *rows][-2:]
        self.has_more = len(rows) == limit
        return [row.value for row in rows]

    def _forget(self) -> bool:
        """Read from the start again; return whether rows had been read."""
        had_rows, self._last = bool(self._last), []
        return had_rows


class FollowedJson:
    """A small JSON file that is replaced whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.value: dict[str, Any] = {}
        self._stamp: Stamp | None = None

    def read(self) -> bool:
        """Read the file if it changed; return whether it did. UsageError for a damaged one."""
        stamp = _stamp(self.path)
        if stamp == self._stamp:
            return False
        self.value = {} if stamp is None else read_checked_json(self.path)
        self._stamp = stamp
        return True


def _stamp(path: Path) -> Stamp | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
