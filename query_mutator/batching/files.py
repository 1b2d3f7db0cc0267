"""Files that are whole or not there: written by rename, with counts and a checksum that every reader verifies.

Binary files are in the safetensors format (readable by that library), with a checksum among the metadata.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from query_mutator.errors import DiskError, UsageError

_CODES: dict[str, Any] = {
    "I8": np.int8,
    "U8": np.uint8,
    "I16": np.int16,
    "U16": np.uint16,
    "I32": np.int32,
    "U32": np.uint32,
}
_CODES |= {"I64": np.int64, "U64": np.uint64, "F32": np.float32, "F64": np.float64, "BOOL": np.bool_}
_NAMES = {np.dtype(kind): code for code, kind in _CODES.items()}
_TEXT_SUFFIXES = (".jsonl", ".json")


class BatchFileError(UsageError):
    """A file of the toolkit is missing, truncated, edited, or belongs to something else; the message names it."""


def is_text(path: str | Path) -> bool:
    """Say whether the suffix asks for the text format (.jsonl, .json); anything else is binary."""
    return Path(path).suffix in _TEXT_SUFFIXES


def json_bytes(value: Any) -> bytes:
    """Return the canonical JSON of a value: sorted keys, no spaces, UTF-8."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def sha256_of(parts: Iterable[bytes | memoryview | NDArray[Any]]) -> str:
    """Return the hexadecimal sha256 of the parts one after the other."""
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, np.ndarray):
            part = np.ascontiguousarray(part).reshape(-1).view(np.uint8).data
        digest.update(part)
    return digest.hexdigest()


@contextmanager
def atomic_write(path: str | Path) -> Iterator[IO[bytes]]:
    """Open a file that appears under `path` only when the block ends well; a failed write is a DiskError."""
    target = Path(path)
    part = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with part.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, target)
    except OSError as error:
        raise DiskError(f"cannot write {target}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def write_json(path: str | Path, value: Any) -> None:
    """Write a value as indented JSON with its own checksum under the key `sha256`."""
    body = dict(value)
    body["sha256"] = sha256_of([json_bytes(value)])
    with atomic_write(path) as file:
        file.write(json.dumps(body, indent=2, ensure_ascii=False).encode() + b"\n")


def read_json(path: str | Path, *, checked: bool = True) -> dict[str, Any]:
    """Return the object that `write_json` wrote; `checked=False` also takes files without a checksum."""
    try:
        body = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise BatchFileError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise BatchFileError(f"{path} is not JSON, it is truncated or edited: {error}") from error
    if not isinstance(body, dict):
        raise BatchFileError(f"{path} holds no JSON object")
    found = body.pop("sha256", None)
    if (checked or found is not None) and found != sha256_of([json_bytes(body)]):
        raise BatchFileError(f"{path} does not match its checksum: it was truncated or edited")
    return body


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayFile:
    """What a binary file holds: `meta` (JSON values), `arrays` by name, and the checksum of both."""

    path: Path
    meta: dict[str, Any]
    arrays: dict[str, NDArray[Any]]
    sha256: str

    def verify(self) -> None:
        """Compare the contents with the checksum; a difference is a BatchFileError that names the file."""
        if arrays_checksum(self.meta, self.arrays) != self.sha256:
            raise BatchFileError(f"{self.path} does not match its checksum: it was edited or damaged")


def arrays_checksum(meta: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> str:
    """Return the sha256 over metadata, names, types, shapes and contents."""
    table = {name: [str(array.dtype), list(array.shape)] for name, array in arrays.items()}
    return sha256_of([json_bytes(dict(meta)), json_bytes(table), *(arrays[name] for name in sorted(arrays))])


def write_arrays(path: str | Path, arrays: Mapping[str, NDArray[Any]], *, kind: str, meta: Mapping[str, Any]) -> str:
    """Write named arrays and JSON metadata into one file and return their checksum; `kind` says what it is."""
    # wide types first, so that every array lies aligned when the file is mapped
    ordered = dict(sorted(arrays.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])))
    full_meta = {"kind": kind, **meta}
    checksum = arrays_checksum(full_meta, ordered)
    header: dict[str, Any] = {"__metadata__": {"meta": json_bytes(full_meta).decode(), "sha256": checksum}}
    offset = 0
    for name, array in ordered.items():
        header[name] = {
            "dtype": _NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    text = json.dumps(header, ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with atomic_write(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in ordered.values():
            file.write(np.ascontiguousarray(array).data if array.size else b"")
    return checksum


def read_arrays(path: str | Path, *, kind: str, verify: bool = True) -> ArrayFile:
    """Map a file of `write_arrays` into memory; another kind, a wrong size or (with `verify`) checksum is an error."""
    path = Path(path)
    try:
        mapped = np.memmap(path, dtype=np.uint8, mode="r")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BatchFileError(f"cannot read {path}: {reason}") from error
    try:
        size = int.from_bytes(mapped[:8].tobytes(), "little")
        header = json.loads(mapped[8 : 8 + size].tobytes())
        info = header.pop("__metadata__")
        meta, checksum = json.loads(info["meta"]), str(info["sha256"])
        arrays = {name: _slice(mapped[8 + size :], entry) for name, entry in header.items()}
        end = 8 + size + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise BatchFileError(
            f"{path} is not a readable {kind} file: it is truncated, edited or another kind"
        ) from error
    if end != mapped.size:
        raise BatchFileError(f"{path} has {mapped.size} bytes where {end} were written: it was truncated or edited")
    if meta.get("kind") != kind:
        raise BatchFileError(f"{path} holds {meta.get('kind')!r}, not {kind!r}")
    result = ArrayFile(path=path, meta=meta, arrays=arrays, sha256=checksum)
    if verify:
        result.verify()
    return result


def _slice(data: NDArray[np.uint8], entry: Mapping[str, Any]) -> NDArray[Any]:
    begin, end = entry["data_offsets"]
    if not 0 <= begin <= end <= data.size:
        raise ValueError("data beyond the end of the file")
    array: NDArray[Any] = np.asarray(data[begin:end]).view(_CODES[entry["dtype"]]).reshape(entry["shape"])
    return array
