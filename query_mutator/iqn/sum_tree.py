"""A binary tree of sums: draws leaves in proportion to their weight, many at a time.

C leaves (a power of two), L levels

Node 1 is the root, the children of node i are 2i and 2i + 1, leaf j is node C + j. Draws and updates of a batch go
down or up all their paths side by side, one numpy call a level.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class SumTree:
    """Weights of up to `capacity` leaves, all 0 at first."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity={capacity} must be at least 1")
        self._levels = (capacity - 1).bit_length()
        self._first = 1 << self._levels  # C
        self._sums = np.zeros(2 * self._first)  # [2C], the first unused

    @property
    def total(self) -> float:
        """Return the sum of all weights."""
        return float(self._sums[1])

    def __getitem__(self, leaves: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the weights of leaves [B]."""
        weights: NDArray[np.float64] = self._sums[self._first + leaves]
        return weights

    def set(self, leaves: NDArray[np.int64], weights: NDArray[np.float64]) -> None:
        """Give leaves [B] new weights [B]; of a leaf that is named twice, the last counts."""
        nodes = self._first + leaves
        self._sums[nodes] = weights
        for _ in range(self._levels):
            nodes = nodes >> 1  # a node that is met twice is summed twice, to the same
            self._sums[nodes] = self._sums[2 * nodes] + self._sums[2 * nodes + 1]

    def find(self, points: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return the leaves [B] in which points [B] of [0, total) lie, weights laid end to end."""
        nodes = np.ones(len(points), dtype=np.int64)
        rest = points.copy()
        for _ in range(self._levels):
            nodes *= 2
            left = self._sums[nodes]
            # Rounding may put a point at the very end of a sum; never go where there is no weight.
            right = (rest >= left) & (self._sums[nodes + 1] > 0)
            rest -= np.where(right, left, 0.0)
            nodes += right
        return nodes - self._first
