"""Eviction from a replay buffer by lowest priority.

Only the samples of lowest priority are in a heap; when it is empty, the lowest ones are chosen again. A heap of all
samples would access cold memory at every level for every sample added. This is not a weighted draw, so it does not
share the sums of `query_mutator.stats.sampling`.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Mapping
from math import inf

import numpy as np

__all__ = ["LowestFirst"]

WAITING = 1024  # samples chosen at a time; more when priorities are equal


class LowestFirst:
    """Slots by priority, lowest first; equal priorities in the order of their addition.

    It reads the buffer's columns; `note` must be called for every new priority.
    """

    def __init__(self, priorities: array[float], serials: array[int], slot_of: Mapping[int, int]) -> None:
        self._priorities, self._serials, self._slot_of = priorities, serials, slot_of
        self._heap: list[tuple[float, int]] = []  # (priority, serial); may contain outdated ones
        self._bound = -inf  # every sample of at most this priority is in the heap

    def note(self, serial: int, priority: float) -> None:
        """Register a sample's new priority."""
        if priority <= self._bound:
            heapq.heappush(self._heap, (priority, serial))
            if len(self._heap) > 2 * len(self._serials) + 64:
                self.choose()

    def pop(self) -> int:
        """Return the slot of the lowest priority; there must be one."""
        while True:
            if not self._heap:
                self.choose()
            priority, serial = heapq.heappop(self._heap)
            slot = self._slot_of.get(serial)
            if slot is not None and self._priorities[slot] == priority:
                return slot

    def choose(self) -> None:
        """Choose the lowest priorities again, from all."""
        priorities = np.array(self._priorities)
        if not len(priorities):
            self._heap, self._bound = [], -inf
            return
        place = min(WAITING, len(priorities)) - 1
        self._bound = float(np.partition(priorities, place)[place])
        slots = np.flatnonzero(priorities <= self._bound).tolist()
        self._heap = [(self._priorities[slot], self._serials[slot]) for slot in slots]
        heapq.heapify(self._heap)
