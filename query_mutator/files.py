"""Files: the only place that writes one whole. Atomic writes, JSON as bytes, JSON-lines files, errors of the disk.

JSON goes through orjson, which takes a fifth of the time of the standard library; what orjson refuses (a lone
surrogate, an integer beyond 64 bits) falls back to the standard library.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import secrets
import shutil
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import orjson

from query_mutator.errors import UsageError, disk_advice, disk_errors

__all__ = [
    "LOCK", "JsonLines", "JsonRow", "atomic_folder", "atomic_write", "check_json_lines", "decode", "disk_advice",
    "disk_errors", "encode", "finite", "parse_json", "read_checked_json", "read_json_lines", "scan_json_lines",
    "sync_folder", "verified", "write_checked_json", "write_json", "write_text",
]  # fmt: skip

LOCK = "lock"  # the file in a folder that a process writes (runs/lock.py)
MAX_DEPTH = 100  # levels of JSON that a user's file may have; Python's own parser ends at about 1,000
_SHA256 = "file_sha256"  # the entry of a checked JSON file
_CRC = b',"crc":"'  # then eight hexadecimal digits and `"}`: the last entry of a row of a JSON-lines file
_CRC_BYTES = len(_CRC) + 10
_NAMED = ("metrics.jsonl", "transcripts.jsonl")  # checksums of their rows start with the name: no two can be exchanged


# --- whole files -----------------------------------------------------------------------------------------------------


@contextmanager
def atomic_write(path: str | Path) -> Iterator[IO[bytes]]:
    """Open a file that replaces `path` when the block ends without an error: a reader sees the old file or the new one.

    The content and the rename are synced to disk; a device or pipe, such as /dev/stdout, is written to as it is. Raises
    DiskError when the file cannot be written.
    """
    target = Path(path)
    if target.exists() and not (target.is_file() or target.is_dir()):
        with disk_errors(target), target.open("wb") as device:
            yield device
        return
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


def write_checked_json(path: str | Path, data: Mapping[str, Any]) -> None:
    """Write an object as `write_json` does, with the sha256 of its name and content as the last entry."""
    body = json.loads(json.dumps(finite(data)))
    write_json(path, {**body, _SHA256: _content_sha256(path, body)})


def read_checked_json(path: str | Path) -> dict[str, Any]:
    """Return the object in a JSON file; UsageError for a damaged one. A file without a checksum is not verified."""
    try:
        body = decode(Path(path).read_bytes())
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise UsageError(f"{path}: not JSON ({error}); it is damaged: restore it, or remove it") from None
    if not isinstance(body, dict):
        raise UsageError(f"{path}: a JSON {type(body).__name__} where an object is expected")
    return dict(verified(path, body))


def verified(path: str | Path, data: Any) -> Any:
    """Return the data of a JSON file without its checksum, if it has one; UsageError when they do not match."""
    if not isinstance(data, dict) or _SHA256 not in data:
        return data
    body = {name: value for name, value in data.items() if name != _SHA256}
    if data[_SHA256] != _content_sha256(path, body):
        raise UsageError(
            f"{path}: its content does not match its checksum, it was damaged, edited or renamed; restore it, or "
            f"accept it as it is by removing its entry {_SHA256!r}"
        )
    return body


def _content_sha256(path: str | Path, body: Mapping[str, Any]) -> str:
    return hashlib.sha256(
        json.dumps([Path(path).name, body], sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()


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


def parse_json(text: str | bytes) -> Any:
    """Return the value of JSON that a user wrote; ValueError for anything that could not be written back as UTF-8 JSON.

    That is, besides text that is not JSON: NaN, infinite numbers, lone surrogates, and more than MAX_DEPTH levels.
    """
    if isinstance(text, bytes):
        text = text.decode(json.detect_encoding(text))
    try:
        value = json.loads(text, parse_constant=_no_number, parse_float=_finite_number)
    except RecursionError:
        raise ValueError(f"nested more than {MAX_DEPTH} levels deep") from None
    if text.count("[") + text.count("{") > MAX_DEPTH:
        _check_depth(value)
    if "\\ud" in text or "\\uD" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("a lone surrogate (\\ud800 to \\udfff), which is not a character") from None
    return value


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number; write null")


def _finite_number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text[:40]} is too large")
    return number


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        inner = (item.values() if isinstance(item, dict) else item for item in level if isinstance(item, (dict, list)))
        level = [one for items in inner for one in items]
    if any(isinstance(item, (dict, list)) for item in level):
        raise ValueError(f"nested more than {MAX_DEPTH} levels deep")


# --- JSON lines ------------------------------------------------------------------------------------------------------


class JsonLines:
    """Append rows to a file, one JSON object per line. `cut_at` first truncates the file to that many bytes.

    The last entry of a row, `crc`, is the CRC-32 of the row before that entry, continued from the row above: it also
    finds rows that were exchanged, removed or repeated. Opening a file verifies the rows that stay, and drops a last
    line that was cut off. Thread-safe. Raises DiskError when the file cannot be written, UsageError for damaged rows.
    """

    def __init__(self, path: Path, *, cut_at: int | None = None) -> None:
        self.path = path
        self._lock = threading.Lock()  # guards the checksum and the order of rows
        self.crc, end = _starts(path)[0], 0  # the checksum of the last row depends on all rows
        if path.exists():
            for row in scan_json_lines(path, end=cut_at):
                self.crc, end = row.crc, row.end
        with disk_errors(path):
            self._file = path.open("ab", buffering=0)
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
            try:
                left = b"".join(lines)
                while left:
                    left = left[self._file.write(left) :]
            except OSError as error:
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
    """A row of a JSON-lines file, the offset behind its line, and its checksum."""

    value: dict[str, Any]
    end: int
    crc: int


def read_json_lines(path: str | Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file in order, as `scan_json_lines` does."""
    return (row.value for row in scan_json_lines(path))


def scan_json_lines(path: str | Path, *, end: int | None = None) -> Iterator[JsonRow]:
    """Yield the rows of a file in order, those of the first `end` bytes; skip a last line that was cut off.

    Raises a UsageError `file:line: ...` for damage of any other kind. Rows of older versions and of other programs have
    no checksum.
    """
    at, number, crc, starts = 0, 0, None, _starts(path)
    try:
        with Path(path).open("rb") as file:
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
                yield JsonRow(value, at, starts[0] if crc is None else crc)
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
        return _row(body), None
    crc = next((crc for crc in (zlib.crc32(row, start) for start in before) if b"%08x" % crc == stored), None)
    if crc is None:
        raise ValueError("damaged, it does not match its checksum")
    return _row(row + b"}"), crc


def _row(text: bytes) -> dict[str, Any]:
    try:
        row = decode(text)
    except ValueError as error:
        raise ValueError(f"not JSON ({error})") from None
    if not isinstance(row, dict):
        raise ValueError(f"a JSON {type(row).__name__} where an object is expected")
    return row


def _is_cut_off(line: bytes, *, is_last: bool) -> bool:
    """Return whether a process or the machine stopped while it wrote this line; some file systems leave zeros."""
    if not line.strip(b"\0\n"):
        return is_last
    return not line.endswith(b"\n") and not re.search(rb',"crc":"[0-9a-f]{8}"}.?\Z', line, re.DOTALL)
