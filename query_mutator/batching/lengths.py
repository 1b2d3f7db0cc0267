"""Lengths of samples in tokens: the input of planning, packing and analysis."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from query_mutator.batching.arrays import IndexArray
from query_mutator.batching.files import sha256_of
from query_mutator.batching.ids import IdTable
from query_mutator.errors import UsageError

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
