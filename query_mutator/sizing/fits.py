"""How the peak of a training step grows with the batch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """peak(B) = max(floor, base + slope B), in bytes: at small batches the optimizer's own temporaries are the peak."""

    floor: float
    base: float
    slope: float

    def at(self, batch: int) -> float:
        """Return the peak at a batch size."""
        return max(self.floor, self.base + self.slope * batch)

    def largest(self, room: float) -> int:
        """Return the largest batch whose peak is within `room` bytes; 0 when there is none."""
        if self.floor > room:
            return 0
        return 2**20 if self.slope <= 0 else max(0, int((room - self.base) / self.slope))
