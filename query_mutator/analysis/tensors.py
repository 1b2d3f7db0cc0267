"""Numbers and texts in TensorProto messages, which newer TensorBoard summaries contain.

1 dtype varint   4 content bytes   5 float   6 double   7 int   8 string
10 int64   11 bool   13 half   16, 17 unsigned
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from query_mutator.analysis.records import Bytes, words
from query_mutator.analysis.series import Floats, Ints
from query_mutator.analysis.wire import FIXED32, FIXED64, LENGTH, VARINT, Fields, read_fields, read_varints

__all__ = ["Tensors"]

_STRING, _HALF, _BFLOAT16 = 7, 19, 14
#: dtype -> encoding of its numbers in `content`
_CONTENT = {1: "<f4", 2: "<f8", 3: "<i4", 4: "u1", 5: "<i2", 6: "i1", 9: "<i8", 10: "?", 17: "<u2", 19: "<f2",
            22: "<u4", 23: "<u8"}  # fmt: skip


class Tensors(NamedTuple):
    """The fields of tensor messages."""

    fields: Fields
    dtype: Ints  # [M]

    @classmethod
    def of(cls, data: Bytes, messages: Fields) -> Tensors:
        """Parse the payloads of LENGTH fields."""
        fields = read_fields(data, messages.start, messages.end)
        dtype = np.zeros(len(messages.owner), dtype=np.int64)
        given = fields.of(1, VARINT)
        dtype[given.owner] = given.value.astype(np.int64)
        return cls(fields, dtype)

    def scalars(self, data: Bytes) -> tuple[Ints, Floats]:
        """Return the messages with exactly one number, and those numbers."""
        parts = list(self._numbers(data))
        row = np.concatenate([rows for rows, _ in parts])
        number = np.concatenate([numbers for _, numbers in parts])
        alone = np.bincount(row, minlength=len(self.dtype))[row] == 1
        return row[alone], number[alone]

    def texts(self, data: Bytes) -> Iterator[tuple[int, str]]:
        """Yield message and text of each string."""
        strings = self.fields.of(8, LENGTH)
        for row, start, end in zip(strings.owner, strings.start, strings.end, strict=True):
            if self.dtype[row] == _STRING:
                yield int(row), bytes(data[start:end]).decode(errors="replace")

    def _numbers(self, data: Bytes) -> Iterator[tuple[Ints, Floats]]:
        content = self.fields.of(4, LENGTH)
        for dtype, kind in _CONTENT.items():
            of_kind = content.take(
                np.flatnonzero((self.dtype[content.owner] == dtype) & (content.value == np.dtype(kind).itemsize))
            )
            yield of_kind.owner, words(data, kind)[of_kind.start].astype(np.float64)
        for number, wire, code in ((5, FIXED32, "<f4"), (6, FIXED64, "<f8")):
            loose, packed = self.fields.of(number, wire), self.fields.of(number, LENGTH)
            packed = packed.take(np.flatnonzero(packed.value == np.dtype(code).itemsize))
            for found in (loose, packed):
                yield found.owner, words(data, code)[found.start].astype(np.float64)
        for number in (7, 10, 11, 13, 16, 17):
            loose, packed = self.fields.of(number, VARINT), self.fields.of(number, LENGTH)
            yield loose.owner, self._from_varints(loose.owner, loose.value)
            values, ends = read_varints(data, packed.start)
            alone = np.flatnonzero(ends == packed.end)
            yield packed.owner[alone], self._from_varints(packed.owner[alone], values[alone])

    def _from_varints(self, row: Ints, value: NDArray[np.uint64]) -> Floats:
        numbers = value.astype(np.int64).astype(np.float64)
        low = value.astype(np.uint16)
        half, brain = self.dtype[row] == _HALF, self.dtype[row] == _BFLOAT16
        numbers[half] = low[half].view(np.float16)
        numbers[brain] = (low[brain].astype(np.uint32) << 16).view(np.float32)
        return numbers
