"""What clients report of replies, and the log of traffic, with one JSON line per reply for `qm plan --from-logs`.

{"right":null ,"time":1796000000,"question":...,"form":...,"reply":...}     a grade is written over `null `
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from query_mutator.apply.proxy.metrics import Metrics
from query_mutator.apply.proxy.upstream import parsed
from query_mutator.errors import UsageError, disk_errors

MAX_WAITING = 1_000  # replies of one key that wait for feedback; the oldest are forgotten
MAX_KEYS = 100
MAX_LOG_BYTES = 16_000_000
MAX_LOG_AGE_S = 30 * 86_400
_TRIM_S = 3600.0
_START = b'{"right":'
_GRADES: Mapping[bool | None, bytes] = {None: b"null ", True: b"true ", False: b"false"}

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Reply:
    """A reply that may get feedback."""

    p_right: float | None = None
    right: bool | None = None
    place: int | None = None  # in the log


class TrafficLog:
    """The file of --log-traffic, which only its owner reads; rows leave by age, once an hour, and by size."""

    def __init__(self, path: str | Path) -> None:
        """Open or create a file; UsageError for one that is not such a log, or that another process writes."""
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
        with disk_errors(Path(path)):
            self._file = os.fdopen(os.open(path, flags, 0o600), "r+b", buffering=0)
            _check_log(self._file.read(len(_START)), path)
        with suppress(ImportError):  # Windows
            import fcntl

            os.fchmod(self._file.fileno(), 0o600)
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise UsageError(f"--log-traffic {path}: another qm serve writes it; name another file") from None
        self._cut = 0  # bytes that left the beginning: places count them
        self._size = self._file.seek(0, os.SEEK_END)
        self.trim()

    def add(self, row: Mapping[str, Any], right: bool | None) -> int:
        """Append a row; return its place."""
        self._notice_deletion()
        line = b"%b%b,%b\n" % (_START, _GRADES[right], orjson.dumps({"time": int(time.time()), **row})[1:])
        self._file.seek(self._size)
        if self._file.write(line) < len(line):
            self._file.truncate(self._size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        place = self._cut + self._size
        self._size += len(line)
        if self._size > MAX_LOG_BYTES or time.time() > self._trimmed + _TRIM_S:
            self.trim(MAX_LOG_BYTES if self._size <= MAX_LOG_BYTES else MAX_LOG_BYTES // 2)
        return place

    def grade(self, place: int, right: bool) -> None:
        """Write a grade into the row at a place, unless it has left."""
        self._notice_deletion()
        if place >= self._cut:
            self._file.seek(place - self._cut + len(_START))
            self._file.write(_GRADES[right])

    def trim(self, max_bytes: int = MAX_LOG_BYTES) -> None:
        """Drop rows that are too old, and the oldest ones beyond a size."""
        self._notice_deletion()
        self._trimmed = time.time()
        self._file.seek(0)
        content, start, oldest = self._file.read(self._size), 0, self._trimmed - MAX_LOG_AGE_S
        for line in content.splitlines(keepends=True):
            made = parsed(line) or {}  # {}: of a line that was cut off
            if self._size - start <= max_bytes and made.get("time", 0) >= oldest:
                break
            start += len(line)
        if start:
            self._file.seek(0)
            self._file.write(content[start:])
            self._file.truncate(self._size - start)
            self._cut, self._size = self._cut + start, self._size - start

    def _notice_deletion(self) -> None:
        """Forget the places in a file that `delete_traffic` emptied."""
        if (size := os.fstat(self._file.fileno()).st_size) < self._size:
            self._cut, self._size = self._cut + self._size, size


def delete_traffic(path: str) -> None:
    """Empty a log of traffic, also while a proxy writes it; UsageError for another file."""
    with disk_errors(Path(path)), open(path, "r+b") as file:
        _check_log(file.read(len(_START)), path)
        file.truncate(0)


def _check_log(beginning: bytes, path: str | Path) -> None:
    if beginning not in (b"", _START):
        raise UsageError(f"{path} is not a log of qm serve --log-traffic; name another file")


class Feedback:
    """Gives each reply a name under which its client, by its key, may report once whether it was right."""

    def __init__(self, metrics: Metrics, log: TrafficLog | None = None) -> None:
        self._metrics, self._log = metrics, log
        self._waiting: dict[str, dict[str, Reply]] = {}  # by key

    def name(self, reply: Reply, key: str) -> str:
        """Return a new name of a reply to the client with a key."""
        name = secrets.token_hex(16)
        mine = self._waiting[key] = self._waiting.pop(key, {})
        mine[name] = reply
        if len(mine) > MAX_WAITING:
            del mine[next(iter(mine))]
        if len(self._waiting) > MAX_KEYS:
            del self._waiting[next(iter(self._waiting))]
        return name

    def record(self, reply: Reply, row: Mapping[str, Any]) -> None:
        """Write a reply that was sent into the log, if there is one."""
        if self._log is not None:
            try:
                reply.place = self._log.add(row, reply.right)
            except OSError as error:
                logger.warning("--log-traffic: %s", error.strerror)

    def take(self, name: str, right: bool, key: str) -> bool:
        """Count feedback; return whether a reply of this name to a client with this key waited for it."""
        reply = self._waiting.get(key, {}).pop(name, None)
        if reply is None:
            return False
        reply.right = right
        if self._log is not None and reply.place is not None:
            with suppress(OSError):
                self._log.grade(reply.place, right)
        for series, value in (("qm_feedback_right", right), ("qm_feedback_p_right", reply.p_right)):
            if value is not None:
                self._metrics.count(f"{series}_sum", value)
                self._metrics.count(f"{series}_count")
        return True
