"""Checkpoints of a fine-tuning run: `OUTPUT/checkpoints/step_N.pt`, tensors and plain types only."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from query_mutator.errors import CheckpointError
from query_mutator.files import disk_errors

FORMAT = "sft 2"
_NAME = re.compile(r"step_(\d+)\.pt")


def checkpoints_in(output: Path) -> list[Path]:
    """Return the checkpoints of an output folder, the newest first."""
    found = [
        (int(match[1]), path) for path in (output / "checkpoints").glob("*.pt") if (match := _NAME.fullmatch(path.name))
    ]
    return [path for _, path in sorted(found, reverse=True)]


def write_checkpoint(output: Path, state: Mapping[str, Any], *, step: int, keep: int) -> Path:
    """Write a checkpoint by rename and remove all but the newest `keep`; DiskError when it cannot be written."""
    from ppo.checkpoint import save_checkpoint

    path = output / "checkpoints" / f"step_{step}.pt"
    with disk_errors(path):
        save_checkpoint(path, {"format": FORMAT, **state})
        for old in checkpoints_in(output)[keep:]:
            old.unlink(missing_ok=True)
    return path


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Return the state in a `.pt`, or in the newest of an output folder; anything else is a CheckpointError."""
    path = Path(path)
    if path.is_dir():
        found = checkpoints_in(path)
        if not found:
            raise CheckpointError(f"{path}: no checkpoint in it; give a folder of `qm train sft`, or a .pt")
        path = found[0]
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged bytes fail in as many ways as there are readers of them
        reason = (str(error).strip() or type(error).__name__).partition("\n")[0]
        raise CheckpointError(f"cannot read the checkpoint {path}: {reason}") from None
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise CheckpointError(f"{path} is no checkpoint of `qm train sft`")
    return state


def output_of(resumed: str | Path) -> Path:
    """Return the output folder that a --resume value lies in."""
    path = Path(resumed)
    return path if path.is_dir() else path.parent.parent
