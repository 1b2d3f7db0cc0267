"""A binary tree of sums: draw a slot with probability proportional to its weight, or change a weight, in O(log n)."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

SMALLEST = 1024


class SumTree:
    """Weights of slots 0, 1, 2, ... (0 until set). A parent is always left + right, so nothing drifts with time.

    The nodes lie in a stdlib array, whose single items are three times as fast to touch as numpy's.
    """

    def __init__(self, weights: Sequence[float] | NDArray[np.float64] = ()) -> None:
        self._leaves = SMALLEST
        self._nodes = array("d")
        self.rebuild(np.asarray(weights, dtype=np.float64))

    @property
    def total(self) -> float:
        """Sum of all weights."""
        return self._nodes[1]

    def __getitem__(self, slot: int) -> float:
        return self._nodes[self._leaves + slot]

    def rebuild(self, weights: NDArray[np.float64]) -> None:
        """Replace all weights: `weights` [n] for the first n slots, 0 for the rest."""
        while self._leaves < len(weights):
            self._leaves *= 2
        nodes = np.zeros(2 * self._leaves)
        nodes[self._leaves : self._leaves + len(weights)] = weights
        first = self._leaves
        while first > 1:
            below = nodes[first : 2 * first]
            nodes[first // 2 : first] = below[0::2] + below[1::2]
            first //= 2
        self._nodes = array("d", nodes.tobytes())

    def set(self, slot: int, weight: float) -> None:
        """Set the weight of one slot; the tree grows by doubling."""
        if slot >= self._leaves:
            self.rebuild(np.append(np.array(self._nodes[self._leaves :]), np.zeros(slot + 1 - self._leaves)))
        nodes, node = self._nodes, self._leaves + slot
        nodes[node] = weight
        node >>= 1
        while node:
            nodes[node] = nodes[2 * node] + nodes[2 * node + 1]
            node >>= 1

    def draw(self, places: Iterable[float]) -> list[int]:
        """Return the slots at `places` in [0, 1) of the cumulated weights; never a slot of weight 0.

        The total must be above 0.
        """
        nodes, leaves, total = self._nodes, self._leaves, self._nodes[1]
        slots = []
        for place in places:
            rest, node = place * total, 1
            while node < leaves:
                node += node
                left = nodes[node]
                if rest >= left:
                    rest -= left
                    node += 1
            slots.append(node - leaves if nodes[node] else self._nearest(node) - leaves)
        return slots

    def _nearest(self, node: int) -> int:
        """Return a leaf with weight near one without: rounding led past the last weight of a branch."""
        while not self._nodes[node]:
            node >>= 1
        while node < self._leaves:
            node = 2 * node + (self._nodes[2 * node + 1] > 0)
        return node
