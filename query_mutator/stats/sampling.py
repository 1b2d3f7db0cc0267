"""Weighted sampling: draw slots in proportion to weights that keep changing."""

from __future__ import annotations

import numpy as np

from query_mutator.types import DoubleArray, IntArray

FIRST_SLOTS = 64  # doubled when they are used up


class WeightedSampler:
    """Weights of slots 0, 1, 2, ..., all 0 until set, laid end to end on a line from 0 to their total."""

    def __init__(self) -> None:
        self._weights = np.zeros(FIRST_SLOTS)
        self._ends: DoubleArray | None = None  # where each weight ends on the line, None when one has changed

    @property
    def total(self) -> float:
        """Sum of all weights."""
        return float(self._cumulated()[-1])

    def __getitem__(self, slots: IntArray) -> DoubleArray:
        """Return the weights [B] of slots [B]."""
        weights: DoubleArray = self._weights[slots]
        return weights

    def set(self, slot: int, weight: float) -> None:
        """Set the weight of one slot."""
        self.update(np.array([slot]), np.array([weight]))

    def update(self, slots: IntArray, weights: DoubleArray) -> None:
        """Set the weights [B] of slots [B]; of a slot that is named twice, the last counts."""
        size = len(self._weights)
        if (needed := int(slots.max(initial=-1)) + 1) > size:
            self._weights = np.append(self._weights, np.zeros(max(needed, 2 * size) - size))
        self._weights[slots] = weights
        self._ends = None

    def find(self, points: DoubleArray) -> IntArray:
        """Return the slots [B] at points [B] of [0, total), never one of weight 0. The total must be above 0."""
        ends = self._cumulated()
        points = np.minimum(points, np.nextafter(ends[-1], 0.0))  # rounding may put a point at the very end
        return np.searchsorted(ends, points, side="right")

    def _cumulated(self) -> DoubleArray:
        if self._ends is None:
            self._ends = np.cumsum(self._weights)
        return self._ends
