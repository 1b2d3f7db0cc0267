"""The base of the toolkit's records: frozen pydantic models that may hold numpy arrays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, PlainSerializer, PlainValidator, ValidationError

from query_mutator.errors import UsageError


def _readonly(values: Any, dtype: type[np.generic]) -> NDArray[Any]:
    """Return `values` as a read-only one-dimensional array; a number that `dtype` cannot hold is a ValueError."""
    if isinstance(values, np.ndarray) and values.dtype == dtype and values.ndim == 1 and not values.flags.writeable:
        return values
    raw = np.asarray(values if len(values) else np.empty(0, dtype))
    if raw.ndim != 1 or (raw.dtype.kind not in "iub"):
        raise ValueError(f"a list of whole numbers is needed, got {raw.dtype} of shape {raw.shape}")
    array = raw.astype(dtype)
    if raw.dtype != array.dtype and not np.array_equal(raw, array):
        raise ValueError(f"numbers outside {np.dtype(dtype).name}")
    array.flags.writeable = False
    return array


def _array(dtype: type[np.generic]) -> tuple[PlainValidator, PlainSerializer]:
    return PlainValidator(lambda values: _readonly(values, dtype)), PlainSerializer(lambda array: array.tolist())


_INT32 = _array(np.int32)
_INT64 = _array(np.int64)
_UINT8 = _array(np.uint8)

#: Field types for arrays in records: any sequence of whole numbers goes in, a read-only array is kept, lists come out.
Int32Array = Annotated[NDArray[Any], _INT32[0], _INT32[1]]
Int64Array = Annotated[NDArray[Any], _INT64[0], _INT64[1]]
UInt8Array = Annotated[NDArray[Any], _UINT8[0], _UINT8[1]]


class Record(BaseModel):
    """A frozen model; unknown fields are errors, arrays compare by content."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    def changed(self, **fields: Any) -> Self:
        """Return a copy with other values in these fields, checked as at birth (`model_copy` checks nothing)."""
        return type(self)(**{**self.__dict__, **fields})

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        mine, theirs = self.__dict__, other.__dict__
        return mine.keys() == theirs.keys() and all(_same(value, theirs[name]) for name, value in mine.items())

    def __hash__(self) -> int:
        return hash((type(self), self.model_dump_json()))


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        return isinstance(left, np.ndarray) and isinstance(right, np.ndarray) and np.array_equal(left, right)
    return bool(left == right)


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
