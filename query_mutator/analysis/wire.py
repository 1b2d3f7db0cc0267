"""Parse many protocol-buffer messages at once: each pass of the loop reads the next field of every message.

M messages, F fields. Format: https://protobuf.dev/programming-guides/encoding
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from query_mutator.analysis.records import Bytes
from query_mutator.analysis.series import Ints

__all__ = ["FIXED32", "FIXED64", "LENGTH", "VARINT", "Fields", "read_fields", "read_varints"]

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5

U64 = NDArray[np.uint64]
_NO_END = 1 << 40  # beyond the end of any message, so that reading the message stops


class Fields(NamedTuple):
    """Fields of messages, in the order of the messages and within each message.

    `value` is the number for VARINT, the length of the payload for LENGTH, and 0 for the others, whose payload is at
    `start`.
    """

    owner: Ints  # [F] index of the message
    number: Ints  # [F]
    kind: Ints  # [F] VARINT, FIXED64, LENGTH or FIXED32
    start: Ints  # [F] first byte of the payload
    value: U64  # [F]

    def of(self, number: int, kind: int) -> Fields:
        """Return the fields of one number and kind."""
        return self.take(np.flatnonzero((self.number == number) & (self.kind == kind)))

    def take(self, rows: Ints) -> Fields:
        """Return some of the fields."""
        return Fields(self.owner[rows], self.number[rows], self.kind[rows], self.start[rows], self.value[rows])

    @property
    def end(self) -> Ints:
        """Return the ends of the payloads of LENGTH fields."""
        return self.start + self.value.astype(np.int64)


def read_fields(data: Bytes, starts: Ints, ends: Ints) -> Fields:
    """Return the fields of the messages at `starts` [M] to `ends` [M]; what follows a damaged field is skipped."""
    owner, place, end = np.arange(len(starts)), starts, ends
    found: list[Fields] = []
    while True:
        more = place < end
        if not more.all():
            owner, place, end = owner[more], place[more], end[more]
        if not len(owner):
            break
        fields, place = _next_field(data, owner, place)
        sound = (place <= end) & np.isin(fields.kind, (VARINT, FIXED64, LENGTH, FIXED32))
        if not sound.all():
            fields, owner, place, end = fields.take(np.flatnonzero(sound)), owner[sound], place[sound], end[sound]
        found.append(fields)
    return _in_order(found)


def read_varints(data: Bytes, places: Ints) -> tuple[U64, Ints]:
    """Return the varints at `places`, and where each ends; a varint of more than ten bytes has no end."""
    numbers, ends, rows = np.zeros(len(places), dtype=np.uint64), places + 1, np.arange(len(places))
    byte = data[places]
    for shift in range(0, 70, 7):  # seven bits per byte, lowest first; the top bit says that more follow
        numbers[rows] |= (byte & 0x7F).astype(np.uint64) << np.uint64(shift)
        rows = rows[byte >= 0x80]
        if not len(rows):
            return numbers, ends
        byte = data[ends[rows]]
        ends[rows] += 1
    ends[rows] = _NO_END
    return numbers, ends


def _next_field(data: Bytes, owner: Ints, place: Ints) -> tuple[Fields, Ints]:
    """Return the field at each `place`, and where the next begins."""
    key, start = read_varints(data, place)
    number, kind = (key >> np.uint64(3)).astype(np.int64), (key & np.uint64(7)).astype(np.int64)
    value = np.zeros(len(owner), dtype=np.uint64)
    after = start + np.where(kind == FIXED64, 8, np.where(kind == FIXED32, 4, 0))
    rows = np.flatnonzero((kind == VARINT) | (kind == LENGTH))
    if len(rows):
        value[rows], begin = read_varints(data, start[rows])
        is_length = kind[rows] == LENGTH
        start[rows] = np.where(is_length, begin, start[rows])
        length = np.minimum(value[rows], np.uint64(_NO_END)).astype(np.int64)
        after[rows] = begin + np.where(is_length, length, 0)
    return Fields(owner, number, kind, start, value), after


def _in_order(found: list[Fields]) -> Fields:
    if not found:
        nothing = np.empty(0, dtype=np.int64)
        return Fields(nothing, nothing, nothing, nothing, nothing.astype(np.uint64))
    together = Fields(*(np.concatenate(columns) for columns in zip(*found, strict=True)))
    return together if len(found) == 1 else together.take(np.argsort(together.owner, kind="stable"))
