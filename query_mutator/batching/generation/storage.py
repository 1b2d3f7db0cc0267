"""Checksummed safetensors files, written by rename: what a length cache, token shards and replay buffers lie in.

The digest covers names, types, shapes, bytes and metadata, so a truncated, edited or mixed-up file is a
`StorageError` that names it. Nothing here can run code from a data file.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from query_mutator.errors import DiskError, UsageError

Arrays = dict[str, NDArray[Any]]

FORMAT_VERSION = "1"
SEPARATOR = "\0"  # between ids in a blob: no id may hold it


class StorageError(UsageError):
    """A file of the batching toolkit is truncated, edited, of another kind or another version; it is named."""


class MismatchError(UsageError):
    """Two things do not belong together: a cache, plan or batches made with other data or another tokenizer."""


def write_by_rename(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Give `write` a file beside `path` and rename it into place when it is complete and on disk."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise DiskError(f"{path} could not be written: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def content_digest(arrays: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]) -> str:
    """Return the sha256 of all names, types, shapes, bytes and metadata but `sha256` itself."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name}\n{array.dtype.str}\n{array.shape}\n".encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
    for name in sorted(set(metadata) - {"sha256"}):
        digest.update(f"{name}\n{metadata[name]}\n".encode())
    return digest.hexdigest()


def write_arrays(path: Path, arrays: Mapping[str, NDArray[Any]], *, kind: str, metadata: Mapping[str, str]) -> str:
    """Write `arrays` and `metadata` to `path` by rename and return the digest that was stored with them."""
    from safetensors.numpy import save

    plain = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    about = {**metadata, "kind": kind, "format_version": FORMAT_VERSION}
    about["sha256"] = content_digest(plain, about)
    payload = save(plain, metadata=about)
    write_by_rename(path, lambda file: file.write(payload))
    return about["sha256"]


def read_arrays(path: Path, *, kind: str) -> tuple[Arrays, dict[str, str]]:
    """Return arrays and metadata of a file of `kind`; StorageError when a byte of it is not as written."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = dict(file.metadata() or {})
            arrays: Arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (SafetensorError, ValueError, OverflowError) as error:
        raise StorageError(f"{path} is no {kind} file, or it is truncated: {error}") from error
    check_kind(path, metadata, kind=kind)
    if content_digest(arrays, metadata) != metadata["sha256"]:
        raise StorageError(f"{path} was changed after it was written: its content does not match its checksum")
    return arrays, metadata


def check_kind(path: Path, metadata: Mapping[str, str], *, kind: str) -> None:
    """Raise StorageError when `metadata` is not that of a file of `kind` in a version read here."""
    found = metadata.get("kind")
    if found != kind or "sha256" not in metadata:
        raise StorageError(f"{path} is no {kind} file (it holds {found or 'something else'})")
    if metadata.get("format_version") != FORMAT_VERSION:
        raise StorageError(f"{path} has format version {metadata.get('format_version')}, read here: {FORMAT_VERSION}")


def pack_strings(strings: Sequence[str]) -> NDArray[np.uint8]:
    """Return `strings` as one UTF-8 blob [bytes]; a string with a NUL character is a UsageError."""
    text = SEPARATOR.join(strings)
    if text.count(SEPARATOR) != max(0, len(strings) - 1):
        raise UsageError("an id holds a NUL character: ids are text without it")
    return np.frombuffer(text.encode("utf-8", "surrogatepass"), dtype=np.uint8)


def unpack_strings(blob: NDArray[np.uint8], count: int) -> list[str]:
    """Return the `count` strings of a blob made by `pack_strings`."""
    if count == 0:
        return []
    strings = blob.tobytes().decode("utf-8", "surrogatepass").split(SEPARATOR)
    if len(strings) != count:
        raise StorageError(f"{len(strings)} ids where {count} were announced")
    return strings
