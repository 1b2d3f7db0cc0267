"""Records, frozen pydantic models that may hold numpy arrays, and helpers for the arrays.

Permutations stay the same in every numpy release.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, PlainValidator, ValidationError

from query_mutator.errors import UsageError

IndexArray = NDArray[Any]  # int32 where the numbers fit: half the memory, faster to gather by


def index_type(count: int) -> type[np.signedinteger[Any]]:
    """Return the smaller of int32 and int64 that holds `count`."""
    return np.int32 if count <= np.iinfo(np.int32).max else np.int64


def permutation(count: int, *seed: int) -> IndexArray:
    """Return 0..count-1 in an order that depends on all seed numbers."""
    # SeedSequence joins the 32-bit words of its numbers, so [2**32, 0] would be [0, 1]: higher words follow the others.
    high = [number >> 32 for number in seed]
    words = [*(number % 2**32 for number in seed), *high, 1] if any(high) else seed
    # The raw words of a bit generator never change, unlike Generator.permutation; the low bits make them unique.
    raw = np.random.PCG64(np.random.SeedSequence(words)).random_raw(count)
    mask = np.uint64((1 << max(count - 1, 1).bit_length()) - 1)
    keys = (raw & ~mask) | np.arange(count, dtype=np.uint64)
    keys.sort()
    keys &= mask
    return keys.astype(index_type(count))


def offsets_of(sizes: NDArray[Any]) -> NDArray[np.int64]:
    """Return where stretches of these sizes [k] begin and end when laid end to end, int64 [k + 1]."""
    offsets = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return offsets


def ranges_of(starts: IndexArray, sizes: IndexArray) -> IndexArray:
    """Return start..start+size-1 of every pair, one after the other."""
    offsets = offsets_of(sizes)
    kind = index_type(max(int(starts.max(initial=0)) + int(sizes.max(initial=0)), int(offsets[-1])))
    ranges: IndexArray = np.arange(offsets[-1], dtype=kind) + np.repeat((starts - offsets[:-1]).astype(kind), sizes)
    return ranges


def sums_of(values: NDArray[Any], begins: NDArray[Any]) -> NDArray[np.int64]:
    """Return the sum of every stretch of `values` that begins at `begins` and ends where the next one begins."""
    return np.add.reduceat(values, begins, dtype=np.int64) if len(begins) else np.empty(0, np.int64)


def readonly(array: NDArray[Any]) -> NDArray[Any]:
    """Return the array, which is made read-only."""
    array.flags.writeable = False
    return array


def _readonly(values: Any, dtype: type[np.generic]) -> NDArray[Any]:
    """Return `values` as a read-only one-dimensional array; raise ValueError for a number that `dtype` cannot hold."""
    if isinstance(values, np.ndarray) and values.dtype == dtype and values.ndim == 1 and not values.flags.writeable:
        return values
    raw = np.asarray(values if len(values) else np.empty(0, dtype))
    if raw.ndim != 1 or (raw.dtype.kind not in "iub"):
        raise ValueError(f"a list of integers is needed, got {raw.dtype} of shape {raw.shape}")
    array = raw.astype(dtype)
    if raw.dtype != array.dtype and not np.array_equal(raw, array):
        raise ValueError(f"numbers outside the range of {np.dtype(dtype).name}")
    return readonly(array)


def _matrix(values: Any, dtype: type[np.generic]) -> NDArray[Any]:
    """Return `values` as a two-dimensional array of `dtype`, not copied if it is one."""
    array = np.asarray(values)
    if array.ndim != 2 or array.dtype.kind not in "iub":
        raise ValueError(f"a matrix of integers is needed, got {array.dtype} of shape {array.shape}")
    return array.astype(dtype, copy=False)


_AS_LISTS = PlainSerializer(lambda array: array.tolist())

# Field types for arrays in records: they accept any sequence of integers, keep a read-only array, and dump lists.
Int32Array = Annotated[NDArray[Any], PlainValidator(partial(_readonly, dtype=np.int32)), _AS_LISTS]
UInt8Array = Annotated[NDArray[Any], PlainValidator(partial(_readonly, dtype=np.uint8)), _AS_LISTS]
Int32Matrix = Annotated[NDArray[np.int32], PlainValidator(partial(_matrix, dtype=np.int32)), _AS_LISTS]
UInt8Matrix = Annotated[NDArray[np.uint8], PlainValidator(partial(_matrix, dtype=np.uint8)), _AS_LISTS]


_new, _set = object.__new__, object.__setattr__


class Ratio:
    """Quotient of two attributes of a record, itself an attribute; 0 when there is nothing to divide by."""

    def __init__(self, part: str, whole: str) -> None:
        self._part = part
        self._whole = whole

    def __get__(self, record: object, _owner: type) -> float:
        whole = getattr(record, self._whole)
        return getattr(record, self._part) / whole if whole else 0.0


class Record(BaseModel):
    """A frozen model that rejects unknown fields and compares arrays by content."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    def changed(self, **fields: Any) -> Self:
        """Return a copy with other values in these fields, validated (`model_copy` validates nothing)."""
        return type(self)(**{**{name: getattr(self, name) for name in type(self).model_fields}, **fields})

    @classmethod
    def unchecked(cls, fields: dict[str, Any]) -> Self:
        """Return the record with these fields, all of them, which is not validated: 1 us in place of 20."""
        record = _new(cls)
        _set(record, "__dict__", fields)
        _set(record, "__pydantic_fields_set__", set(fields))
        _set(record, "__pydantic_extra__", None)
        _set(record, "__pydantic_private__", None)
        return record

    def plus(self, **counts: float) -> Self:
        """Return a copy with these numbers added to its fields."""
        return self.model_copy(update={name: getattr(self, name) + count for name, count in counts.items()})

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return all(_same(getattr(self, name), getattr(other, name)) for name in type(self).model_fields)

    def __hash__(self) -> int:
        return hash((type(self), self.model_dump_json()))


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        return isinstance(left, np.ndarray) and isinstance(right, np.ndarray) and np.array_equal(left, right)
    return bool(left == right)


class TokenRecord(Record):
    """A sequence with its loss mask (1 = has a loss), int32 and uint8 [L]."""

    input_ids: Int32Array
    loss_mask: UInt8Array

    @property
    def length(self) -> int:
        """Number of tokens, padding included where the record has any."""
        return len(self.input_ids)

    @property
    def num_loss_tokens(self) -> int:
        """Number of tokens with a loss."""
        return int(np.count_nonzero(self.loss_mask))

    def cut(self, length: int) -> Self:
        """Return the first `length` tokens."""
        if self.length <= length:
            return self
        fields = ("input_ids", "loss_mask", "segment_ids")
        columns = {name: column for name in fields if (column := getattr(self, name, None)) is not None}
        return self.model_copy(update={name: column[:length] for name, column in columns.items()})


class SampleValidationError(ValueError):
    """Tokens, mask or segments of a sample that do not fit each other; as a record is made, pydantic wraps it."""


def check_row(ids: NDArray[Any], mask: NDArray[Any], what: str, segments: NDArray[Any] | None = None) -> None:
    """Raise SampleValidationError for a row without tokens, or with a mask or segments that do not fit them."""
    if len(ids) == 0:
        raise SampleValidationError(f"{what} has no tokens")
    if len(ids) != len(mask):
        raise SampleValidationError(f"{what}: {len(ids)} input_ids but {len(mask)} loss_mask values")
    if mask.max() > 1:
        raise SampleValidationError(f"{what}: loss_mask must contain only 0 and 1")
    if segments is not None and len(segments) != len(ids):
        raise SampleValidationError(f"{what}: {len(segments)} segment_ids for {len(ids)} tokens")


class Fingerprint(Record):
    """Hexadecimal sha256 of what it is of, `full_hash`, and its first 16 digits."""

    fingerprint: str = Field(min_length=16, max_length=16)
    full_hash: str

    def matches(self, other: Self) -> bool:
        """Return whether everything that is hashed is the same."""
        return self.full_hash == other.full_hash


@contextmanager
def settings_errors() -> Iterator[None]:
    """Turn the first ValidationError of a settings record into a UsageError of one line."""
    try:
        yield
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        reason = str(first["msg"]).removeprefix("Value error, ")
        raise UsageError(f"{where}: {reason}" if where else reason) from None
