"""Files, and the folder of a run: part of the base, so that every room and both toolkits may use it.

Here is the only place that writes a file whole, and JSON as bytes: through orjson, which takes a fifth of the time of
the standard library; what orjson refuses (a lone surrogate, an integer beyond 64 bits) falls back to the latter.
`JsonLines` has files of rows with checksums; `locked` guards a folder that a process writes; `run_dir` creates the
folder of a run, writes config, metrics, transcripts and summary, and says whether a run is running, finished,
interrupted or killed; `metrics.tsv` lists every metric key.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import html
import json
import math
import os
import re
import reprlib
import secrets
import shutil
import threading
import types
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import orjson

from query_mutator.errors import UsageError, disk_advice, disk_errors

if TYPE_CHECKING:
    from filelock import SoftFileLock

__all__ = [
    "LOCK", "JsonLines", "as_type", "atomic_folder", "atomic_write", "check_json_lines", "count_values", "decode",
    "decode_object", "disk_advice", "disk_errors", "encode", "file_sha256", "finite", "html_document", "locked",
    "parse_json", "read_checked_json", "read_json_lines", "record_of", "sync_folder", "user_cache_folder", "verified",
    "write_checked_json", "write_json", "write_text",
]  # fmt: skip

LOCK = "lock"  # the file in a folder that a process writes: its id, host and start
_WAIT_S = 0.5  # a lock may just be written, and a takeover may need a second attempt
_CRC = b',"crc":"'  # then eight hexadecimal digits and `"}`: the last entry of a row of a JSON-lines file
_CRC_BYTES = len(_CRC) + 10
_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)
_APPEND |= getattr(os, "O_NOFOLLOW", 0)  # a link in a stranger's run folder may lead anywhere
_SHA256 = "file_sha256"  # the entry of a checked JSON file
#: Colors of every page, light and dark: text has a contrast of at least 4.5 with what is behind it.
_COLORS = """
:root { color-scheme: light dark; --paper: light-dark(#fff, #10151a); --stripe: light-dark(#f5f7f7, #182027);
  --ink: light-dark(#16212b, #e7edf1); --dim: light-dark(#55626e, #a2b0bb); --line: light-dark(#dfe5e6, #2b3740);
  --accent: light-dark(#0a6a73, #5fcbd4); --good: light-dark(#17703a, #62d08a); --bad: light-dark(#b3261e, #ff938a); }
""".strip()


# --- whole files -----------------------------------------------------------------------------------------------------

R = TypeVar("R")


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


def user_cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder in the user's cache for files that can be made again."""
    folder = environ.get("XDG_CACHE_HOME")
    return (Path(folder).expanduser() if folder else Path.home() / ".cache") / "query-mutator"


def sync_folder(folder: Path) -> None:
    """Sync a folder, which makes renames in it durable, where the system lets a folder be opened."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def file_sha256(path: str | Path) -> str:
    """Return the sha256 of a file's content, in hexadecimal digits."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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


def html_document(*, title: str, style: str, body: str, scripts: str = "", policy: str = "") -> str:
    """Return a whole page: `style` follows the base colors, `scripts` the body; `title` is text, the rest markup.

    `policy` is the Content-Security-Policy, which says what the page may load.
    """
    meta = f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}">\n' if policy else ""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f"{meta}<title>{html.escape(title)}</title>\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>\n{_COLORS}\n{style}\n</style>\n</head>\n<body>\n{body}\n{scripts}</body>\n</html>\n"
    )


def write_checked_json(path: str | Path, data: Mapping[str, Any]) -> None:
    """Write an object as `write_json` does, with the sha256 of its name and content as the last entry."""
    body = json.loads(json.dumps(finite(data)))
    write_json(path, {**body, _SHA256: _content_sha256(path, body)})


def read_checked_json(path: str | Path) -> dict[str, Any]:
    """Return the object in a JSON file; UsageError for a damaged one. A file without a checksum is not verified."""
    try:
        body = decode_object(Path(path).read_bytes())
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise UsageError(f"{path}: {error}; it is damaged: restore it, or remove it") from None
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


def encode(value: Any, *, sort_keys: bool = False) -> bytes:
    """Return a value as JSON in UTF-8, on one line; numbers that are not finite become null."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS if sort_keys else None)
    except TypeError:  # a lone surrogate, a key that is not a string, an integer beyond 64 bits
        return json.dumps(value, sort_keys=sort_keys).encode()


def decode(text: bytes) -> Any:
    """Return the value of JSON in UTF-8, integers beyond 64 bits as floats; ValueError for anything else."""
    try:
        return orjson.loads(text)
    except ValueError:  # NaN or a lone surrogate, which some servers write
        try:
            return json.loads(text.decode())
        except RecursionError:
            raise ValueError("JSON is nested too deeply") from None


def count_values(text: bytes | bytearray) -> int:
    """Return how many values JSON has at most; as objects they take up to thirty times its length."""
    return sum(map(text.count, (b",", b"[", b"{")))


def decode_object(text: str | bytes, parse: Callable[[Any], Any] = decode) -> dict[str, Any]:
    """Return the object of JSON as `parse` does, `decode` or `parse_json`; ValueError in words for anything else."""
    try:
        value = parse(text)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text ({error.reason})") from None
    except ValueError as error:
        raise ValueError(f"not JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"a JSON {type(value).__name__} where an object is expected")
    return value


def parse_json(text: str | bytes) -> Any:
    """Return the value of JSON that a user wrote; ValueError for anything that could not be written back as UTF-8 JSON.

    That is, besides text that is not JSON: NaN, infinite numbers, lone surrogates, and about a thousand levels.
    """
    if isinstance(text, bytes):
        text = text.decode(json.detect_encoding(text))
    orjson.loads(text)  # refuses them
    try:
        return json.loads(text)  # integers beyond 64 bits stay what they are
    except RecursionError:
        raise ValueError("JSON is nested too deeply") from None


def record_of(cls: type[R], values: object, *, where: str) -> R:
    """Return the dataclass `cls` made of a JSON object, without the entries of later versions.

    ValueError for a value of another type, a missing one, and what `cls` refuses; `where` begins the names of fields.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"{where} is not an object")
    hints = _hints(cls)  # type: ignore[arg-type]  # mypy: a class is hashable
    known = {name: as_type(value, hints[name], f"{where}.{name}") for name, value in values.items() if name in hints}
    try:
        return cls(**known)
    except TypeError as error:
        raise ValueError(f"{where}: {error}") from None


def as_type(value: Any, hint: Any, where: str) -> Any:
    """Return a JSON value as the type of an annotation; ValueError for another.

    A list becomes a tuple or a frozenset, an object a dataclass; one value may stand for a tuple of one.
    """
    origin, parts = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if is_dataclass(hint) and isinstance(hint, type):
        return value if isinstance(value, hint) else record_of(hint, value, where=where)
    if origin in (Union, types.UnionType):
        for part in parts:
            try:
                return as_type(value, part, where)
            except ValueError:
                continue
    elif origin is Literal:
        if any(value == one and type(value) is type(one) for one in parts):
            return value
    elif origin in (tuple, frozenset):
        items = value if isinstance(value, (list, tuple)) else () if value is None else (value,)
        return origin(as_type(item, parts[0], where) for item in items)
    elif origin is Mapping and isinstance(value, Mapping):
        return {as_type(key, parts[0], where): as_type(item, parts[1], f"{where}.{key}") for key, item in value.items()}
    elif hint is float:
        if type(value) in (int, float) and abs(value) <= 1e300:
            return float(value)
    elif type(value) is hint:
        return value
    raise ValueError(f"{where} is {reprlib.repr(value)}, not {getattr(hint, '__name__', hint)}")


@functools.cache
def _hints(cls: type[Any]) -> Mapping[str, Any]:
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in fields(cls)}


# --- rows with checksums ---------------------------------------------------------------------------------------------


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


# --- the lock of a folder --------------------------------------------------------------------------------------------


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, which is created, and removed again if nothing was written into it.

    `filelock` takes a lock over only with proof that its owner on this host is dead: no process has the id, or one that
    started at another time. The owner of a lock from another host, or another container, cannot be checked. Raises a
    UsageError while another process holds it; a DiskError when the lock cannot be written.
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
