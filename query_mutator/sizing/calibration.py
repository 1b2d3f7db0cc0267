"""What a card really takes beside the estimate: a context, and a factor for workspaces and fragments.

measured = context + factor x estimate
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from query_mutator.errors import UsageError

MIB = 2**20
CONTEXT_BYTES = 600 * MIB  # a CUDA context with its libraries: 300 to 1300 MiB by card and version
SLACK = 0.06  # of the card, for workspaces and fragments, where nothing was measured
MEASURED_SLACK = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The context in bytes, the factor, and what they rest on."""

    context_bytes: int = CONTEXT_BYTES
    factor: float = 1.0
    slack: float = SLACK
    rests_on: str = "context and fragments by rule of thumb"

    def room(self, vram_bytes: int) -> float:
        """Return the bytes of a card that an estimate may come to."""
        return (vram_bytes * (1 - self.slack) - self.context_bytes) / self.factor


def fit_calibration(measured: Sequence[float], estimated: Sequence[float], *, totals: bool) -> Calibration:
    """Return the calibration for bytes measured and estimated at some batch sizes; ValueError for nonsense.

    `totals` are those of nvidia-smi, context included; else they are what PyTorch allocated, and the context is still
    a rule of thumb. One point gives the factor alone.
    """
    import numpy as np

    y, x = np.asarray(measured, dtype=np.float64), np.asarray(estimated, dtype=np.float64)
    if not len(x) or not (x > 0).all() or not (y > 0).all():
        raise ValueError("measured memory must be above 0")
    context = float(CONTEXT_BYTES)
    if totals and len(set(x)) > 1:
        factor, context = (float(value) for value in np.polyfit(x, y, 1))
    else:
        factor = float(((y - (context if totals else 0.0)) @ x) / (x @ x))
    if factor <= 0 or context < 0:
        raise ValueError("memory does not grow with the estimate; are these figures of this model?")
    points = "1 measured point" if len(x) == 1 else f"{len(x)} measured points"
    return Calibration(context_bytes=int(context), factor=factor, slack=MEASURED_SLACK, rests_on=f"{points}")


def write_calibration(path: str, calibration: Calibration) -> None:
    """Write it as JSON."""
    Path(path).write_text(json.dumps(asdict(calibration), indent=2) + "\n", encoding="utf-8")


def read_calibration(path: str) -> Calibration:
    """Return what `write_calibration` wrote; UsageError when the file holds no such thing."""
    try:
        return Calibration(**json.loads(Path(path).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"--calibration {path}: {error}; `qm size calibrate` writes such a file") from None
