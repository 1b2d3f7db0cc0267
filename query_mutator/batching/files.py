"""Files with a checksum that every reader verifies: JSON objects, and named arrays in the safetensors format.

They are written by `query_mutator.files.atomic_write`: a reader sees a whole file or none.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from query_mutator import files
from query_mutator.errors import UsageError


def json_bytes(value: Any) -> bytes:
    """Return the canonical JSON of a value: sorted keys, no spaces, UTF-8."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def sha256_of(parts: Iterable[bytes | memoryview | NDArray[Any]]) -> str:
    """Return the hexadecimal sha256 of the concatenated parts."""
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, np.ndarray):
            part = np.ascontiguousarray(part).reshape(-1).view(np.uint8).data
        digest.update(part)
    return digest.hexdigest()


@contextmanager
def reading(path: str | Path) -> Iterator[None]:
    """Turn the operating system's refusal to read `path` into a UsageError."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayFile:
    """Contents of a binary file: `meta` (JSON values), `arrays` by name, and the checksum of both."""

    meta: dict[str, Any]
    arrays: dict[str, NDArray[Any]]
    sha256: str


def arrays_checksum(meta: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> str:
    """Return the sha256 over metadata, names, types, shapes and contents."""
    table = {name: [str(array.dtype), list(array.shape)] for name, array in arrays.items()}
    return sha256_of([json_bytes(dict(meta)), json_bytes(table), *(arrays[name] for name in sorted(arrays))])


def write_arrays(path: str | Path, arrays: Mapping[str, NDArray[Any]], *, kind: str, meta: Mapping[str, Any]) -> str:
    """Write named arrays and JSON metadata into one file and return their checksum; `kind` names the type of file."""
    full_meta = {"kind": kind, **meta}
    checksum = arrays_checksum(full_meta, arrays)
    # One metadata key, because the library writes several in random order and equal plans have equal files.
    header = {"meta": json_bytes({**full_meta, "sha256": checksum}).decode()}
    content = safetensors.numpy.save({name: np.ascontiguousarray(array) for name, array in arrays.items()}, header)
    with files.atomic_write(path) as file:
        file.write(content)
    return checksum


def read_arrays(path: str | Path, *, kind: str) -> ArrayFile:
    """Load a file of `write_arrays`; raise UsageError for one of another kind or size, or with other contents."""
    path = Path(path)
    try:
        with reading(path), safe_open(path, framework="numpy") as file:
            info = file.metadata()
            meta = files.parse_json(info["meta"])
            checksum = meta.pop("sha256")
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except UsageError:
        raise
    except (SafetensorError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise UsageError(f"{path} is not a readable {kind} file; it is truncated, edited or another kind") from error
    if meta.get("kind") != kind:
        raise UsageError(f"{path} holds {meta.get('kind')!r}, not {kind!r}")
    if arrays_checksum(meta, arrays) != checksum:
        raise UsageError(f"{path} does not match its checksum; it was edited or damaged")
    return ArrayFile(meta=meta, arrays=arrays, sha256=checksum)
