"""Bin packing: which sequences share a pack, from their lengths alone, which are small integers.

n sequences, P packs. Decreasing order places all sequences of one length at once; best fit keeps the open packs in
lists by the room left in them; first fit skips blocks of full packs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from query_mutator.batching.arrays import IndexArray, offsets_of, reach_of, sums_of

_BLOCK = 64  # packs that share one entry for their largest room


class Packs(NamedTuple):
    """Sequence numbers in pack order [n]; pack p has order[offsets[p]:offsets[p+1]]."""

    order: IndexArray
    offsets: NDArray[np.int64]

    def totals(self, lengths: NDArray[Any]) -> NDArray[np.int64]:
        """Return the summed lengths of every pack [P]."""
        return sums_of(lengths[self.order], self.offsets[:-1])


def pack_decreasing(lengths: NDArray[Any], capacity: int, *, max_segments: int | None = None) -> Packs:
    """Pack longest first, each into the fullest pack that has room (best-fit decreasing)."""
    longest_first = np.argsort(-lengths.astype(np.int32), kind="stable")
    if max_segments is not None:
        packs = pack_best_fit(lengths[longest_first], capacity, max_segments=max_segments)
        return Packs(longest_first[packs.order], packs.offsets)
    pack_of, count = _fill_equal_lengths(np.bincount(lengths), capacity)
    return _grouped(pack_of, count, longest_first)


def _fill_equal_lengths(counts: NDArray[np.int64], capacity: int) -> tuple[NDArray[np.int32], int]:
    """Return the pack of every sequence, longest first, and the number of packs, given the count of each length.

    All sequences of one length are placed at once: each pack with room r takes r // length of them.
    """
    pack_of = np.empty(int(counts.sum()), np.int32)
    rooms: list[list[NDArray[np.int32]]] = [[] for _ in range(capacity + 1)]  # packs by the room left in them
    open_rooms = 0  # bit r is set if packs with room r exist
    made = done = 0
    for length in np.flatnonzero(counts)[::-1].tolist():
        left = int(counts[length])
        while left:
            # The lowest set bit from `length` up is the smallest room that fits; without one, open new packs.
            fitting = open_rooms >> length
            room = length + (fitting & -fitting).bit_length() - 1 if fitting else capacity
            each = room // length
            if not fitting:
                packs = np.arange(made, made - (-left // each), dtype=np.int32)
                made += len(packs)
            else:
                packs = rooms[room].pop()
                spare = len(packs) + (-left // each)
                if spare > 0:
                    rooms[room].append(packs[-spare:])
                    packs = packs[:-spare]
                elif not rooms[room]:
                    open_rooms ^= 1 << room
            placed = min(left, each * len(packs))
            pack_of[done : done + placed] = np.repeat(packs, each)[:placed]
            done, left = done + placed, left - placed
            # Every pack now has `each` more sequences, except that the last one may have fewer.
            whole = placed // each
            for some, rest in ((packs[:whole], room - each * length), (packs[whole:], room - placed % each * length)):
                if len(some) and rest:
                    rooms[rest].append(some)
                    open_rooms |= 1 << rest
    return pack_of, made


def pack_best_fit(lengths: NDArray[Any], capacity: int, *, max_segments: int | None = None) -> Packs:
    """Pack in the order given, each into the fullest pack that has room."""
    rooms: list[list[int]] = [[] for _ in range(capacity + 1)]
    bits = [1 << room for room in range(capacity + 1)]
    open_rooms = made = 0
    segments: list[int] = []
    most = max_segments or len(lengths)
    pack_of: list[int] = []
    place = pack_of.append
    for length in lengths.tolist():
        fitting = open_rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            packs = rooms[room]
            pack = packs.pop()
            if not packs:
                open_rooms ^= bits[room]
            segments[pack] += 1
        else:
            room, pack, made = capacity, made, made + 1
            segments.append(1)
        place(pack)
        room -= length
        if room and segments[pack] < most:
            rooms[room].append(pack)
            open_rooms |= bits[room]
    return _grouped(np.array(pack_of, np.int32), made, None)


def pack_first_fit(lengths: NDArray[Any], capacity: int, *, max_segments: int | None = None) -> Packs:
    """Pack in the order given, each into the earliest pack that has room.

    Room only shrinks, so the earliest pack with room for a given length only moves forward: keep one pointer per
    length, and skip blocks of packs without room.
    """
    pointers = [0] * (capacity + 1)
    room: list[int] = []
    block_room: list[int] = []  # at least the largest room in the block
    segments: list[int] = []
    most = max_segments or len(lengths)
    pack_of: list[int] = []
    place = pack_of.append
    for length in lengths.tolist():
        pack = _first_with_room(length, pointers[length], room, block_room)
        if pack == len(room):
            if pack % _BLOCK == 0:
                block_room.append(capacity)
            room.append(capacity)
            segments.append(0)
        pointers[length] = pack
        segments[pack] += 1
        room[pack] = room[pack] - length if segments[pack] < most else 0
        place(pack)
    return _grouped(np.array(pack_of, np.int32), len(room), None)


def _first_with_room(length: int, pack: int, room: list[int], block_room: list[int]) -> int:
    """Return the first pack from `pack` on with room for `length`, or the number of packs if there is none."""
    made = len(room)
    while pack < made:
        if room[pack] >= length:
            return pack
        block = pack // _BLOCK
        if block_room[block] >= length:
            begin, end = block * _BLOCK, min((block + 1) * _BLOCK, made)
            for candidate in range(pack + 1, end):
                if room[candidate] >= length:
                    return candidate
            if end - begin == _BLOCK:
                block_room[block] = max(room[begin:end])
        block += 1
        while block < len(block_room) and block_room[block] < length:
            block += 1
        pack = min(block * _BLOCK, made)
    return made


def pack_in_order(lengths: NDArray[Any], capacity: int, *, max_segments: int | None = None) -> Packs:
    """Pack runs of neighbors into as few packs as possible; their concatenation has the input's order."""
    reach = reach_of(lengths, capacity)
    if max_segments is not None:
        reach = np.minimum(reach, np.arange(len(lengths)) + max_segments)
    offsets, step = [0], reach.item
    while offsets[-1] < len(lengths):
        offsets.append(step(offsets[-1]))
    return Packs(np.arange(len(lengths)), np.array(offsets, np.int64))


def _grouped(pack_of: NDArray[np.int32], count: int, names: IndexArray | None) -> Packs:
    """Return sequences by pack, in input order within a pack; `names` renames them."""
    bits = max(len(pack_of) - 1, 1).bit_length()
    keys = pack_of.astype(np.int64) << bits
    keys |= np.arange(len(pack_of))
    keys.sort()
    keys &= (1 << bits) - 1
    return Packs(keys if names is None else names[keys], offsets_of(np.bincount(pack_of, minlength=count)))
