"""From an estimate to a card: its memory, the batch that fits, what a real run takes in addition to the estimate.

peak(B) = max(floor, base + slope B)        measured = context + factor x estimate
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from query_mutator.errors import UsageError
from query_mutator.files import parse_json, write_json

__all__ = [
    "CARDS", "GIB", "MIB", "Calibration", "Fit", "fit_calibration", "read_calibration", "vram_bytes",
    "write_calibration",
]  # fmt: skip

MIB, GIB = 2**20, 2**30
_MOST_BYTES = 2.0**60

#: Memory of cards in GiB, as their makers state it
CARDS = {
    "rtx3060": 12, "rtx3090": 24, "rtx4070": 12, "rtx4080": 16, "rtx4090": 24, "rtx5070": 12, "rtx5080": 16,
    "rtx5090": 32, "t4": 16, "l4": 24, "a10": 24, "v100": 16, "a100": 40, "a100-80": 80, "l40s": 48, "h100": 80,
    "h200": 141, "b200": 180,
}  # fmt: skip

CONTEXT_BYTES = 600 * MIB  # a CUDA context with its libraries: 300 to 1300 MiB by card and version
SLACK = 0.06  # share of the card kept for workspaces and fragmentation, as long as nothing was measured
MEASURED_SLACK = 0.02


def vram_bytes(text: str) -> int:
    """Return the bytes of `12GB`, `12GiB`, `12227MiB` or a card's name; GB counts as GiB, as makers of cards do."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(g|m)(?:i?b)?", text.strip().lower())
    if match:
        return int(float(match[1]) * (GIB if match[2] == "g" else MIB))
    name = re.sub(r"[\s_]|nvidia|geforce", "", text.lower())
    if name in CARDS:
        return CARDS[name] * GIB
    raise UsageError(f"--vram {text} is not an amount or a known card; write 12GB, or one of {', '.join(CARDS)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Peak bytes by batch size; at small batches the optimizer's own temporaries set the floor."""

    floor: float
    base: float
    slope: float

    def at(self, batch: int) -> float:
        """Return the peak at a batch size."""
        return max(self.floor, self.base + self.slope * batch)

    def largest(self, room: float) -> int:
        """Return the largest batch whose peak is within `room` bytes; 0 if there is none."""
        if self.floor > room:
            return 0
        return 2**20 if self.slope <= 0 else max(0, int((room - self.base) / self.slope))


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The context in bytes, the factor, the share of the card to keep free, and the source of these figures."""

    context_bytes: int = CONTEXT_BYTES
    factor: float = 1.0
    slack: float = SLACK
    rests_on: str = "context and fragmentation by rule of thumb"

    def __post_init__(self) -> None:
        if not (0.01 <= self.factor <= 100 and 0 <= self.context_bytes < _MOST_BYTES and 0 <= self.slack < 1):
            raise UsageError(
                f"a factor of {self.factor:.3g}, a context of {self.context_bytes / MIB:.3g} MiB and a slack of "
                f"{self.slack} cannot be a calibration; check that the figures are of this model"
            )

    def room(self, vram_bytes: int) -> float:
        """Return the largest estimate in bytes that fits a card."""
        return (vram_bytes * (1 - self.slack) - self.context_bytes) / self.factor


def fit_calibration(measured: Sequence[float], estimated: Sequence[float], *, totals: bool) -> Calibration:
    """Return the calibration for bytes measured and estimated at some batch sizes; UsageError if none fits.

    `totals` are figures of nvidia-smi, context included; otherwise they are what PyTorch allocated, and the context
    stays a rule of thumb. A single point gives the factor alone, and so do points too close or too coarse for a line:
    a context below 0 is rounding of the figures.
    """
    import numpy as np

    y, x = np.asarray(measured, dtype=np.float64), np.asarray(estimated, dtype=np.float64)
    if not len(x) or not all(1 <= size < _MOST_BYTES for size in (*x, *y)):
        raise UsageError("measured memory must be at least 1 byte and below 1 EiB; check the figures")
    context, offset = float(CONTEXT_BYTES), float(CONTEXT_BYTES) if totals else 0.0
    factor = float((y - offset) @ x / (x @ x))
    points, by_rule = "1 measured point" if len(x) == 1 else f"{len(x)} measured points", ""
    if totals and len(set(x)) > 1:
        line = [float(value) for value in np.polyfit(x, y, 1)]
        if line[0] <= 0:
            raise UsageError(
                "measured memory does not grow with the estimate; check that the figures are of this model"
            )
        if line[1] >= 0:
            factor, context = line
        else:
            by_rule = f", context of {CONTEXT_BYTES // MIB} MiB by rule of thumb"
    if factor <= 0:
        raise UsageError(
            f"measured memory is below {CONTEXT_BYTES // MIB} MiB, which a CUDA context takes; leave out --totals for "
            "what PyTorch allocated"
        )
    return Calibration(context_bytes=int(context), factor=factor, slack=MEASURED_SLACK, rests_on=points + by_rule)


def write_calibration(path: str, calibration: Calibration) -> None:
    """Write a calibration as JSON."""
    write_json(path, asdict(calibration))


def read_calibration(path: str | Path) -> Calibration:
    """Return what `write_calibration` wrote; UsageError if the file holds something else."""
    try:
        found = Calibration(**parse_json(Path(path).read_text(encoding="utf-8")))
        numbers = (found.context_bytes, found.factor, found.slack)
        if not all(isinstance(one, (int, float)) and 0 <= one < math.inf for one in numbers) or not found.factor:
            raise ValueError("context_bytes, factor and slack must be numbers from 0, factor above 0")
        return found
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"--calibration {path}: {error}; `qm size calibrate` writes such a file") from None
