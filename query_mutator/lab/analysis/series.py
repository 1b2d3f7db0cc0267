"""Series: the points of one tag as columns of step, wall time and value."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

__all__ = ["Floats", "Ints", "Reducer", "Series"]

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

#: ways in which a series becomes one number
Reducer = Literal[
    "last", "best_so_far", "mean_last_k", "auc", "time_to_threshold", "rate", "mean", "median", "max", "min"
]


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one tag [n]; `wall` is in seconds since 1970 as read from a file, since the run's t0 in a Run."""

    step: Ints
    wall: Floats
    value: Floats  # may hold NaN and infinities

    def __len__(self) -> int:
        return len(self.step)

    @classmethod
    def joined(cls, parts: Iterable[Series]) -> Series:
        """Return several parts as one."""
        columns = zip(*((part.step, part.wall, part.value) for part in parts), strict=True)
        return cls(*(np.concatenate(column) for column in columns))

    def take(self, rows: Ints | NDArray[np.bool_]) -> Series:
        """Return some of the points."""
        return Series(self.step[rows], self.wall[rows], self.value[rows])

    def since(self, t0: float) -> Series:
        """Return the points with `wall` relative to `t0`."""
        return Series(self.step, self.wall - t0, self.value)

    def by_step(self) -> Series:
        """Return the points in rising steps, the latest of those that share one."""
        if (np.diff(self.step) > 0).all():
            return self
        order = np.lexsort((np.arange(len(self)), self.wall, self.step))
        last = np.append(np.diff(self.step[order]) > 0, True)
        return self.take(order[last])
