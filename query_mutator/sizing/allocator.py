"""What CUDA's caching allocator would hold: it keeps freed blocks, splits them, and asks for more in large segments.

    up to 1 MiB     from segments of 2 MiB
    below 10 MiB    from segments of 20 MiB
    beyond          segments of the size itself, rounded up to 2 MiB

Rules read from PyTorch's CUDACachingAllocator; one stream, no expandable segments.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

MIB = 2**20
_SMALL, _MIDDLE = 1 * MIB, 10 * MIB


class _Block:
    __slots__ = ("address", "free", "next", "prev", "size")

    def __init__(self, size: int, address: int) -> None:
        self.size, self.address, self.free = size, address, True
        self.prev: _Block | None = None
        self.next: _Block | None = None


class CachingAllocator:
    """Best fit among free blocks of its pool, splitting what is too large, merging neighbours that are free."""

    def __init__(self) -> None:
        self.reserved = 0
        self._free: dict[bool, list[tuple[int, int, _Block]]] = {True: [], False: []}  # by size, then by address

    def allocate(self, size: int) -> _Block:
        """Return a block of at least `size` bytes."""
        small = size <= _SMALL
        pool = self._free[small]
        at = bisect.bisect_left(pool, (size, 0))
        block = pool.pop(at)[2] if at < len(pool) else self._segment(size, small)
        rest = block.size - size
        if rest >= (512 if small else _SMALL):
            self._split(block, size, small)
        block.free = False
        return block

    def release(self, block: _Block, *, small: bool) -> None:
        """Keep a block for later."""
        block.free = True
        for other in (block.prev, block.next):
            if other is not None and other.free:
                self._remove(other, small)
                block = self._merged(block, other)
        bisect.insort(self._free[small], (block.size, block.address, block))

    def _segment(self, size: int, small: bool) -> _Block:
        rounded = -(-size // (2 * MIB)) * 2 * MIB
        segment = 2 * MIB if small else 20 * MIB if size < _MIDDLE else rounded
        self.reserved += segment
        return _Block(segment, self.reserved - segment)

    def _split(self, block: _Block, size: int, small: bool) -> None:
        rest = _Block(block.size - size, block.address + size)
        rest.prev, rest.next = block, block.next
        if block.next is not None:
            block.next.prev = rest
        block.next, block.size = rest, size
        bisect.insort(self._free[small], (rest.size, rest.address, rest))

    def _remove(self, block: _Block, small: bool) -> None:
        pool = self._free[small]
        del pool[bisect.bisect_left(pool, (block.size, block.address))]

    @staticmethod
    def _merged(block: _Block, other: _Block) -> _Block:
        first, second = (other, block) if block.prev is other else (block, other)
        first.size += second.size
        first.next = second.next
        if second.next is not None:
            second.next.prev = first
        first.free = True
        return first


def reserved_peak(trace: Sequence[tuple[int, int]]) -> int:
    """Return the bytes the allocator holds after a trace of (block, +bytes) and (block, -bytes)."""
    allocator, blocks = CachingAllocator(), {}
    for number, size in trace:
        if size > 0:
            blocks[number] = allocator.allocate(size)
        elif size < 0 and number in blocks:
            allocator.release(blocks.pop(number), small=-size <= _SMALL)
    return allocator.reserved
