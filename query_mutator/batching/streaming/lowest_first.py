"""Eviction from a replay buffer by lowest priority: a heap whose outdated entries are skipped."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Mapping

__all__ = ["LowestFirst"]


class LowestFirst:
    """Slots by priority, lowest first; equal priorities in the order of their addition.

    It reads the buffer's columns; `note` must be called for every new priority.
    """

    def __init__(self, priorities: array[float], serials: array[int], slot_of: Mapping[int, int]) -> None:
        self._priorities, self._serials, self._slot_of = priorities, serials, slot_of
        self._heap: list[tuple[float, int]] = []  # (priority, serial)

    def note(self, serial: int, priority: float) -> None:
        """Register a sample's new priority."""
        heapq.heappush(self._heap, (priority, serial))
        if len(self._heap) > 2 * len(self._serials) + 64:
            self.choose()

    def pop(self) -> int:
        """Return the slot of the lowest priority; there must be one."""
        while True:
            priority, serial = heapq.heappop(self._heap)
            slot = self._slot_of.get(serial)
            if slot is not None and self._priorities[slot] == priority:
                return slot

    def choose(self) -> None:
        """Order all samples again; a sorted list is a heap."""
        self._heap = sorted(zip(self._priorities, self._serials, strict=True))
