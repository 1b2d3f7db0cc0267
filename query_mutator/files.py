"""Files: the only place that writes one whole. Atomic writes, JSON as bytes, JSON-lines files, errors of the disk.

JSON goes through orjson, which takes a fifth of the time of the standard library; what orjson refuses (a lone
surrogate, an integer beyond 64 bits) falls back to the standard library.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import secrets
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import orjson

from query_mutator.errors import DiskError, UsageError

__all__ = [
    "JsonLines", "atomic_folder", "atomic_write", "decode", "disk_advice", "disk_errors", "encode", "finite",
    "read_json_lines", "sync_folder", "write_json", "write_text",
]  # fmt: skip

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_CLOSED = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ENOENT, errno.EEXIST)


# --- errors of the disk ----------------------------------------------------------------------------------------------


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


# --- whole files -----------------------------------------------------------------------------------------------------


@contextmanager
def atomic_write(path: str | Path) -> Iterator[IO[bytes]]:
    """Open a file that replaces `path` when the block ends without an error: a reader sees the old file or the new one.

    The content and the rename are synced to disk. Raises DiskError when the file cannot be written.
    """
    target = Path(path)
    # Not `.name` alone: two processes may write the same file at once.
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
    with disk_errors(target):
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            partial.replace(target)
        finally:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
        sync_folder(target.parent)


@contextmanager
def atomic_folder(path: str | Path) -> Iterator[Path]:
    """Make a folder that replaces the folder `path` when the block ends without an error; yield where to fill it.

    Raises DiskError when it cannot be written.
    """
    target = Path(path)
    partial, old = (target.with_name(f".{target.name}.{secrets.token_hex(4)}.{end}") for end in ("partial", "old"))
    with disk_errors(target):
        try:
            partial.mkdir(parents=True)
            yield partial
            if target.exists():  # a folder cannot be renamed over another one
                target.replace(old)
            partial.replace(target)
            shutil.rmtree(old, ignore_errors=True)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        sync_folder(target.parent)


def sync_folder(folder: Path) -> None:
    """Sync a folder, which makes renames in it durable, where the system lets a folder be opened."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def write_text(path: str | Path, text: str) -> None:
    """Write a text file whole, in UTF-8."""
    with atomic_write(path) as file:
        file.write(text.encode())


def write_json(path: str | Path, data: Any) -> None:
    """Write a value as indented JSON; numbers that are not finite become null."""
    write_text(path, json.dumps(finite(data), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def finite(data: Any) -> Any:
    """Return plain JSON data in which numbers that are not finite are None."""
    if isinstance(data, Mapping):
        return {key: finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


# --- JSON as bytes ---------------------------------------------------------------------------------------------------


def encode(value: Any) -> bytes:
    """Return a value as JSON in UTF-8, on one line; numbers that are not finite become null."""
    try:
        return orjson.dumps(value)
    except TypeError:  # a lone surrogate, a key that is not a string, an integer beyond 64 bits
        return json.dumps(value).encode()


def decode(text: bytes) -> Any:
    """Return the value of JSON in UTF-8, integers beyond 64 bits as floats; ValueError for anything else."""
    try:
        return orjson.loads(text)
    except ValueError:  # NaN or a lone surrogate, which some servers write
        try:
            return json.loads(text.decode())
        except RecursionError:
            raise ValueError("JSON is nested too deeply") from None


# --- JSON lines ------------------------------------------------------------------------------------------------------


class JsonLines:
    """Append rows to a file, one JSON object per line. `cut_at` first truncates the file to that many bytes.

    Thread-safe. Raises DiskError when the file cannot be written.
    """

    def __init__(self, path: Path, *, cut_at: int | None = None) -> None:
        self.path = path
        self._lock = threading.Lock()  # guards the file, which buffers a row until it is flushed
        with disk_errors(path):
            self._file = path.open("ab")
            if cut_at is not None:  # never beyond the end: that would pad the file with zeros
                self._file.truncate(min(cut_at, path.stat().st_size))

    def append(self, *rows: Mapping[str, Any]) -> None:
        """Write rows and flush them to the operating system."""
        with disk_errors(self.path), self._lock:
            self._file.write(b"".join([encode(row) + b"\n" for row in rows]))
            self._file.flush()

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


def read_json_lines(path: str | Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file in order; skip a torn last line, raise a UsageError `file:line: ...` for any other."""
    text = Path(path).read_text(encoding="utf-8")
    lines = text.removesuffix("\n").split("\n") if text else []  # splitlines would split at U+2028 within a text
    for number, line in enumerate(lines, 1):
        try:
            yield json.loads(line)
        except ValueError as error:
            if number < len(lines):
                raise UsageError(f"{path}:{number}: not JSON ({error})") from None
