"""Checkpoints of tensors and plain types only, so that loading one runs no code from it."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch


def save_checkpoint(path: str | Path, state: Mapping[str, Any]) -> Path:
    """Write `state` to `path` atomically: a reader sees the old file or the new one. OSError when it cannot."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Serialized in memory first: torch reports a full disk as a RuntimeError, a plain write as OSError.
    content = io.BytesIO()
    torch.save(dict(state), content)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            file.write(content.getbuffer())
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    _sync_folder(path.parent)
    return path


def _sync_folder(folder: Path) -> None:
    """Sync the folder, which makes the rename durable, where the system lets a folder be opened."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def load_checkpoint(path: str | Path, *, entry: str = "policy") -> dict[str, Any]:
    """Return the state written by `save_checkpoint`, on the CPU; ValueError of one line if it lacks `entry`."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise ValueError(f"no checkpoint at {path}") from error
    except Exception as error:  # damaged bytes fail in many ways
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"cannot read the checkpoint {path}: {reason}") from error
    if not isinstance(state, dict) or entry not in state:
        raise ValueError(f"{path} is not a checkpoint of this kind: it has no entry {entry!r}")
    return state
