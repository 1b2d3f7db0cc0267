"""Checkpoints of tensors and plain types only, so that loading one runs no code from it.

A file is the zip archive of `torch.save`, with the sha256 of all bytes before it as the archive's comment. `torch.load`
reads it as any other; `load_checkpoint` verifies it.
"""

from __future__ import annotations

import hashlib
import io
import mmap
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

_LABEL = b"sha256 "  # the comment: this and the digest in hexadecimal
_COMMENT_BYTES = len(_LABEL) + 64


def save_checkpoint(path: str | Path, state: Mapping[str, Any]) -> Path:
    """Write `state` to `path` atomically: a reader sees the old file or the new one. OSError if that fails."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Serialized in memory first: torch reports a full disk as a RuntimeError, a plain write as OSError.
    content = io.BytesIO()
    torch.save(dict(state), content)
    content.seek(-2, os.SEEK_END)  # the last two bytes of a zip archive: the length of its comment
    content.write(_COMMENT_BYTES.to_bytes(2, "little"))
    digest = hashlib.sha256(content.getbuffer()).hexdigest()
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            file.write(content.getbuffer())
            file.write(_LABEL + digest.encode())
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def load_checkpoint(path: str | Path, *, entry: str = "policy") -> dict[str, Any]:
    """Return the state written by `save_checkpoint`, on the CPU; ValueError of one line if it lacks `entry`."""
    try:
        _verify(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise ValueError(f"no checkpoint at {path}") from error
    except pickle.UnpicklingError:  # PyTorch's own message advises to load those after all
        what = "it holds Python objects, which may run code; only tensors and plain values load"
        raise ValueError(f"cannot read the checkpoint {path}: {what}") from None
    except Exception as error:  # damaged bytes fail in many ways
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"cannot read the checkpoint {path}: {reason}") from error
    if not isinstance(state, dict) or entry not in state:
        raise ValueError(f"{path} is not a checkpoint of this kind: it has no entry {entry!r}")
    return state


def _verify(path: str | Path) -> None:
    """Raise a ValueError unless the content of a file matches its digest."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        size = max(0, len(content) - _COMMENT_BYTES)
        with memoryview(content) as view, view[:size] as archive:
            digest = hashlib.sha256(archive).hexdigest()
        if content[size:] != _LABEL + digest.encode():
            raise ValueError("its content does not match its digest; it was damaged, or another program wrote it")
