"""Weights of slots and their sums: draw a slot with probability proportional to its weight, or change a weight.

A tree of sums with two levels: blocks of 64 weights below, one sum for each above. Both steps are then a few calls
into C: changing a weight notes its block, and drawing k slots sums the noted blocks anew, cumulates the block sums
and k blocks. A binary tree touches fewer numbers, but one at a time from Python: drawing 32 of 100,000 took it three
times as long.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

BLOCK = 64

FloatArray = NDArray[np.float64]


class WeightedSlots:
    """Weights of slots 0, 1, 2, ... (0 until set). A block's sum is always made anew, so nothing drifts with time.

    The numbers lie in stdlib arrays, whose single items are three times as fast to touch as numpy's; draws go through
    numpy views of the same memory.
    """

    def __init__(self, weights: Sequence[float] | FloatArray = ()) -> None:
        self._weights = array("d")
        self._sums = array("d")
        self._changed: set[int] = set()  # blocks whose sums are out of date
        self._cumulated: FloatArray | None = None  # of the sums, until a weight changes
        self.rebuild(np.asarray(weights, dtype=np.float64))

    @property
    def total(self) -> float:
        """Sum of all weights."""
        return float(self._block_ends()[-1]) if self._sums else 0.0

    def __getitem__(self, slot: int) -> float:
        return self._weights[slot]

    def rebuild(self, weights: FloatArray) -> None:
        """Replace all weights: `weights` [n] for the first n slots, none for others."""
        blocks = np.zeros((-(-len(weights) // BLOCK), BLOCK))
        blocks.reshape(-1)[: len(weights)] = weights
        self._weights = array("d", blocks.tobytes())
        self._sums = array("d", blocks.sum(axis=1).tobytes())
        self._changed.clear()
        self._cumulated = None

    def set(self, slot: int, weight: float) -> None:
        """Set the weight of one slot; a new block is made for a slot beyond the last."""
        while slot >= len(self._weights):
            self._weights.extend([0.0] * BLOCK)
            self._sums.append(0.0)
        if self._weights[slot] == weight:
            return
        self._weights[slot] = weight
        self._changed.add(slot // BLOCK)

    def draw(self, places: FloatArray) -> list[int]:
        """Return the slots [n] at `places` [n] in [0, 1) of the cumulated weights; never a slot of weight 0.

        The total must be above 0.
        """
        ends = self._block_ends()
        place = _below(places * ends[-1], ends[-1])
        block = np.searchsorted(ends, place, side="right")
        begins = ends[block] - np.frombuffer(self._sums)[block]
        inside = np.cumsum(self._blocks()[block], axis=1)  # [n, BLOCK]
        place = _below(place - begins, inside[:, -1])
        slots: list[int] = (block * BLOCK + (inside > place[:, None]).argmax(axis=1)).tolist()
        return slots

    def _blocks(self) -> FloatArray:
        return np.frombuffer(self._weights).reshape(-1, BLOCK)

    def _block_ends(self) -> FloatArray:
        if self._changed or self._cumulated is None:
            sums = np.frombuffer(self._sums)
            changed = list(self._changed)
            sums[changed] = self._blocks()[changed].sum(axis=1)
            self._changed.clear()
            self._cumulated = np.cumsum(sums)
        return self._cumulated


def _below(places: FloatArray, end: FloatArray) -> FloatArray:
    """Return the places, none at or past the end: sums of another order differ in their last bits."""
    return np.minimum(places, np.nextafter(end, 0.0))
