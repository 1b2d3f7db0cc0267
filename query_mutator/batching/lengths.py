"""Ids and token lengths of samples: the input of planning, packing and analysis.

Ids are stored as bytes: a million take a few MB in memory, far less on disk, and are decoded on use.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from query_mutator.batching.files import BatchFileError, sha256_of
from query_mutator.batching.records import IndexArray, offsets_of
from query_mutator.errors import UsageError

_PROBE_BYTES = 1 << 16  # compressed first, to find out whether compression pays
_MAX_KEY_BYTES = 64  # longer ids are compared as Python strings


class IdTable:
    """A fixed list of ids. `IdTable.range(n, first)` stands for "first".."first+n-1" and stores nothing."""

    def __init__(
        self, blob: NDArray[np.uint8] | None, lengths: NDArray[np.int32] | None, count: int, first: int = 0
    ) -> None:
        self._blob = blob  # uint8 [total bytes], None for a range
        self._lengths = lengths  # int32 [n], bytes per id
        self._count = count
        self.first = first  # first number of a range, 0 otherwise

    @classmethod
    def range(cls, count: int, first: int = 0) -> IdTable:
        """Return the ids "first".."first+count-1": positions in a data set, or in a part of it."""
        return cls(None, None, count, first)

    @classmethod
    def from_list(cls, ids: Sequence[str]) -> IdTable:
        """Return the table of these ids, in this order."""
        joined = "".join(ids)
        blob = np.frombuffer(joined.encode(), np.uint8)
        sizes: Iterable[int] = map(len, ids) if joined.isascii() else (len(one.encode()) for one in ids)
        return cls(blob, np.fromiter(sizes, np.int32, len(ids)), len(ids))

    @property
    def is_range(self) -> bool:
        """Whether the ids are positions."""
        return self._blob is None

    @cached_property
    def _offsets(self) -> IndexArray:
        assert self._lengths is not None
        return offsets_of(self._lengths)

    @cached_property
    def _position_of(self) -> dict[str, int]:
        return {one: position for position, one in enumerate(self.to_list())}

    @cached_property
    def digest(self) -> str:
        """Hexadecimal sha256 of the ids in their order."""
        if self._blob is None or self._lengths is None:
            return sha256_of([f"range {self.first} {self._count}".encode()])
        return sha256_of([b"ids", self._lengths, self._blob])

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, position: int) -> str:
        return self.take([position])[0]

    def take(self, positions: Sequence[int] | NDArray[Any]) -> list[str]:
        """Return the ids at these positions; raise IndexError for a position outside the table."""
        index = np.asarray(positions, np.int64)
        if index.size and not 0 <= int(index.min()) <= int(index.max()) < self._count:
            raise IndexError(f"id position outside 0..{self._count - 1}")
        if self._blob is None:
            return [str(position) for position in (index + self.first).tolist()]
        begins, ends = self._offsets[index].tolist(), self._offsets[index + 1].tolist()
        blob = self._blob
        return [blob[begin:end].tobytes().decode() for begin, end in zip(begins, ends, strict=True)]

    def to_list(self) -> list[str]:
        """Return all ids."""
        if self._blob is None:
            return [str(position) for position in range(self.first, self.first + self._count)]
        data, offsets = self._blob.tobytes(), self._offsets.tolist()
        if data.isascii():  # one decode for all ids, then slices of the text
            text = data.decode()
            return [text[begin:end] for begin, end in pairwise(offsets)]
        return [data[begin:end].decode() for begin, end in pairwise(offsets)]

    def positions(self, ids: Sequence[str]) -> IndexArray:
        """Return the positions of these ids; raise UsageError for an unknown id."""
        try:
            return np.fromiter((self._position_of[one] for one in ids), np.int64, len(ids))
        except KeyError as error:
            raise UsageError(f"unknown sample id {error.args[0]!r}") from None

    def reordered(self, order: IndexArray) -> IdTable:
        """Return the table with its ids in another order."""
        ids = self.to_list()
        return IdTable.from_list([ids[position] for position in order.tolist()])

    def canonical_order(self) -> IndexArray | None:
        """Return the order of the ids by length, then bytes, or None if they are in this order.

        Ids counted up ("s0".."s11", padded with zeros or not) are in canonical order.
        """
        if self._lengths is None or self._count < 2:
            return None
        lengths = self._lengths
        if int(lengths.max()) > _MAX_KEY_BYTES:
            ids = self.to_list()
            order = sorted(range(self._count), key=lambda position: (len(ids[position].encode()), ids[position]))
            return np.array(order, np.int64)
        rows = self._matrix().view(f"S{max(int(lengths.max()), 1)}")[:, 0]  # equal lengths compare by their bytes
        falls = (lengths[1:] == lengths[:-1]) & (rows[1:] < rows[:-1])
        if not falls.any() and np.all(lengths[1:] >= lengths[:-1]):
            return None
        return np.lexsort((rows, lengths)).astype(np.int64)

    def _matrix(self) -> NDArray[np.uint8]:
        """Return the ids as rows of bytes [n, width], padded with zeros."""
        assert self._blob is not None
        assert self._lengths is not None
        width = max(int(self._lengths.max(initial=1)), 1)
        if int(self._lengths.min(initial=width)) == width:
            return self._blob.reshape(self._count, width)
        matrix = np.zeros((self._count, width), np.uint8)
        matrix[np.arange(width) < self._lengths[:, None]] = self._blob
        return matrix

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Return arrays for a file; ids that resemble their neighbors compress to almost nothing."""
        if self._blob is None or self._lengths is None:
            return {}
        # Byte planes (all first characters, all second ones, ...) of similar ids are long runs, which compress well.
        planes = self._lengths.max(initial=0) <= _MAX_KEY_BYTES
        body = np.ascontiguousarray(self._matrix().T).tobytes() if planes else self._blob.tobytes()
        return {
            "id_lengths": _deflate(self._lengths.tobytes()),
            "id_bytes": _deflate(body),
            "id_planes": np.array([planes, self._count], np.int64),
        }

    @classmethod
    def from_arrays(
        cls, arrays: Mapping[str, NDArray[Any]], *, count: int, first: int = 0, path: object = "the file"
    ) -> IdTable:
        """Return the table of `to_arrays`; raise BatchFileError with `path` for arrays that do not fit together."""
        if "id_bytes" not in arrays:
            return cls.range(count, first)
        try:
            lengths = np.frombuffer(_inflate(arrays["id_lengths"]), np.int32)
            blob = np.frombuffer(_inflate(arrays["id_bytes"]), np.uint8)
            planes, stored = arrays["id_planes"].tolist()
            if stored != count or len(lengths) != count:
                raise ValueError(f"{len(lengths)} ids where {count} are expected")
            if planes:
                longest = int(lengths.max(initial=1)) or 1
                matrix = np.ascontiguousarray(blob.reshape(longest, count).T)
                blob = matrix[np.arange(longest) < lengths[:, None]]
        except (ValueError, KeyError, zlib.error) as error:
            raise BatchFileError(f"{path}: the ids cannot be read: {error}") from error
        return cls(blob, lengths, count)


def _deflate(data: bytes) -> NDArray[np.uint8]:
    """Return the data compressed, or unchanged if its beginning does not compress; the first byte says which."""
    probe = data[:_PROBE_BYTES]
    pays = len(zlib.compress(probe, 1)) < 0.9 * len(probe) if probe else False
    return np.frombuffer(b"\x01" + zlib.compress(data, 1) if pays else b"\x00" + data, np.uint8)


def _inflate(stored: NDArray[np.uint8]) -> bytes:
    data = stored.tobytes()
    return zlib.decompress(data[1:]) if data[:1] == b"\x01" else data[1:]


LengthArray = NDArray[np.int32]


@runtime_checkable
class HasLengths(Protocol):
    """Anything with ids and lengths as arrays, such as a LengthCache."""

    @property
    def ids(self) -> IdTable: ...

    @property
    def lengths(self) -> LengthArray: ...


@dataclass(frozen=True)
class LengthTable:
    """Ids [n] and token lengths int32 [n], in the canonical order of the ids."""

    ids: IdTable
    lengths: LengthArray

    def __len__(self) -> int:
        return len(self.lengths)

    def take(self, index: IndexArray) -> LengthTable:
        """Return the samples at these positions, in this order."""
        return LengthTable(ids=self.ids.reordered(index), lengths=self.lengths[index])

    @cached_property
    def digest(self) -> str:
        """Hexadecimal sha256 of ids and lengths."""
        return sha256_of([self.ids.digest.encode(), self.lengths])


LengthSource = Mapping[str, int] | Sequence[int] | NDArray[Any] | HasLengths


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
    elif isinstance(source, HasLengths):
        ids, values = source.ids, np.asarray(source.lengths)
    else:
        values = _whole(source)
        ids = IdTable.range(len(values))
    if values.size:
        _check_range(ids, values)
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


def _check_range(ids: IdTable, values: NDArray[Any]) -> None:
    bad = np.flatnonzero((values < 1) | (values > np.iinfo(np.int32).max))
    if bad.size:
        first = int(bad[0])
        raise UsageError(f"sample {ids[first]!r} has length {values[first]}; it must be from 1 to 2^31 - 1")


def as_values(source: Mapping[str, int] | Sequence[int] | NDArray[Any], table: LengthTable, what: str) -> NDArray[Any]:
    """Return one integer per sample of the table, from a mapping by id or a list in the table's order."""
    if isinstance(source, Mapping):
        missing = [one for one in table.ids.to_list() if one not in source]
        if missing:
            raise UsageError(f"{what} has no value for sample {missing[0]!r} ({len(missing)} missing)")
        return _whole([source[one] for one in table.ids.to_list()])
    values = _whole(source)
    if not table.ids.is_range and len(table):
        raise UsageError(f"{what} must be a mapping by id, because the lengths have ids")
    if len(values) != len(table):
        raise UsageError(f"{what} has {len(values)} values for {len(table)} samples")
    return values
