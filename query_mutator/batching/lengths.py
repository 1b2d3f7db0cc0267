"""Ids and token lengths of samples: the input of planning, packing and analysis.

Ids are stored as bytes: a million take a few MB in memory, far less on disk, and are decoded on use.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from query_mutator.batching.files import sha256_of
from query_mutator.batching.records import IndexArray
from query_mutator.errors import UsageError

_MAX_ID_BYTES = 256


class IdTable:
    """A fixed list of ids. `IdTable.range(n)` stands for "0".."n-1", positions in a data set, and stores nothing."""

    def __init__(self, names: NDArray[np.bytes_] | None, count: int) -> None:
        self._names = names  # UTF-8, padded with zeros [n]; None for a range
        self._count = count

    @classmethod
    def range(cls, count: int) -> IdTable:
        """Return the ids "0".."count-1"."""
        return cls(None, count)

    @classmethod
    def from_list(cls, ids: Sequence[str]) -> IdTable:
        """Return the table of these ids, in this order; raise UsageError for one over 256 bytes or with a zero byte."""
        if not ids:
            return cls.range(0)
        joined = "".join(ids)
        names = np.array(ids if joined.isascii() else [one.encode() for one in ids], dtype=np.bytes_)
        if names.itemsize > _MAX_ID_BYTES or "\0" in joined:
            raise UsageError(f"an id has {names.itemsize} bytes; ids have up to {_MAX_ID_BYTES}, none of them zero")
        return cls(names, len(ids))

    @cached_property
    def digest(self) -> str:
        """Hexadecimal sha256 of the ids in their order."""
        return sha256_of([f"range {self._count}".encode()] if self._names is None else [b"ids", self._names])

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, position: int) -> str:
        return self.take([position])[0]

    def take(self, positions: Sequence[int] | NDArray[Any]) -> list[str]:
        """Return the ids at these positions; raise IndexError for a position outside the table."""
        index = np.asarray(positions, np.int64)
        if index.size and not 0 <= int(index.min()) <= int(index.max()) < self._count:
            raise IndexError(f"id position outside 0..{self._count - 1}")
        if self._names is None:
            return [str(position) for position in index.tolist()]
        return [name.decode() for name in self._names[index].tolist()]

    def to_list(self) -> list[str]:
        """Return all ids."""
        return self.take(np.arange(self._count))

    def reordered(self, order: IndexArray) -> IdTable:
        """Return the table with its ids in another order."""
        if self._names is None:
            return IdTable.from_list(self.take(order))
        return IdTable(self._names[order], self._count)

    def canonical_order(self) -> IndexArray | None:
        """Return the order of the ids by length, then bytes, or None if they are in this order.

        Ids counted up ("s0".."s11", padded with zeros or not) are in canonical order.
        """
        if self._names is None or self._count < 2:
            return None
        names, lengths = self._names, np.char.str_len(self._names)
        falls = (lengths[1:] == lengths[:-1]) & (names[1:] < names[:-1])
        if not falls.any() and np.all(lengths[1:] >= lengths[:-1]):
            return None
        return np.lexsort((names, lengths)).astype(np.int64)

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Return arrays for a file; ids that resemble their neighbors compress to almost nothing."""
        if self._names is None:
            return {}
        # Byte planes (all first characters, all second ones, ...) of similar ids are long runs, which compress well.
        planes = np.ascontiguousarray(self._names.view(np.uint8).reshape(self._count, -1).T)
        return {"ids": np.frombuffer(zlib.compress(planes.tobytes(), 1), np.uint8)}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]], *, count: int, path: object = "the file") -> IdTable:
        """Return the table of `to_arrays`; raise UsageError with `path` for arrays that do not fit together."""
        if "ids" not in arrays:
            return cls.range(count)
        try:
            planes = zlib.decompressobj().decompress(arrays["ids"].tobytes(), _MAX_ID_BYTES * count)
            names = np.ascontiguousarray(np.frombuffer(planes, np.uint8).reshape(-1, count).T)
            return cls(names.view(f"S{names.shape[1]}")[:, 0], count)
        except (ValueError, TypeError, zlib.error) as error:
            raise UsageError(f"{path}: the ids cannot be read as {count}: {error}") from error


@dataclass(frozen=True)
class LengthTable:
    """Ids [n] and token lengths int32 [n], in the canonical order of the ids."""

    ids: IdTable
    lengths: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.lengths)

    def take(self, index: IndexArray) -> LengthTable:
        """Return the samples at these positions, in this order."""
        return LengthTable(ids=self.ids.reordered(index), lengths=self.lengths[index])

    @cached_property
    def digest(self) -> str:
        """Hexadecimal sha256 of ids and lengths."""
        return sha256_of([self.ids.digest.encode(), self.lengths])


LengthSource = Mapping[str, int] | Sequence[int] | NDArray[Any] | LengthTable


def as_lengths(source: LengthSource) -> LengthTable:
    """Return ids and lengths from a mapping, a list or array of lengths (ids are positions), or a length cache.

    Ids are put into canonical order, so that the order in which a mapping was filled does not matter. Raises
    UsageError with the sample's id for a length below 1 or beyond int32.
    """
    if isinstance(source, LengthTable):
        return source
    if isinstance(source, Mapping):
        ids = IdTable.from_list(list(source))
        values: NDArray[Any] = _whole(source.values())
    else:
        values = _whole(source)
        ids = IdTable.range(len(values))
    bad = np.flatnonzero((values < 1) | (values > np.iinfo(np.int32).max))
    if bad.size:
        first = int(bad[0])
        raise UsageError(f"sample {ids[first]!r} has length {values[first]}; it must be from 1 to 2^31 - 1")
    table = LengthTable(ids=ids, lengths=values.astype(np.int32))
    order = ids.canonical_order()
    return table if order is None else table.take(order)


def _whole(values: Collection[int] | NDArray[Any]) -> NDArray[Any]:
    """Return integers as an array [n]; raise UsageError for anything else."""
    try:
        whole = values if isinstance(values, np.ndarray) else np.fromiter(values, np.int64, len(values))
        # np.fromiter truncates fractions without an error; then the sums differ.
        fractions = whole is not values and sum(values) != int(whole.sum())
    except (TypeError, ValueError, OverflowError) as error:
        raise UsageError(f"lengths must be integers, one per sample: {error}") from error
    if fractions or whole.ndim != 1 or whole.dtype.kind not in "iu":
        raise UsageError("lengths must be integers, one per sample")
    return whole
