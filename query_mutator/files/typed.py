"""JSON of a file as the records it stands for: each value has the type of its field, or a ValueError names it."""

from __future__ import annotations

import functools
import reprlib
import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

__all__ = ["as_type", "record_of"]

R = TypeVar("R")


def record_of(cls: type[R], values: object, *, where: str) -> R:
    """Return the dataclass `cls` made of a JSON object, without the entries of later versions.

    ValueError for a value of another type, a missing one, and what `cls` refuses; `where` begins the names of fields.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"{where} is not an object")
    hints = _hints(cls)  # type: ignore[arg-type]  # mypy: a class is hashable
    known = {name: as_type(value, hints[name], f"{where}.{name}") for name, value in values.items() if name in hints}
    try:
        return cls(**known)
    except TypeError as error:
        raise ValueError(f"{where}: {error}") from None


def as_type(value: Any, hint: Any, where: str) -> Any:
    """Return a JSON value as the type of an annotation; ValueError for another.

    A list becomes a tuple or a frozenset, an object a dataclass; one value may stand for a tuple of one.
    """
    origin, parts = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if is_dataclass(hint) and isinstance(hint, type):
        return record_of(hint, value, where=where)
    if origin in (Union, types.UnionType):
        for part in parts:
            try:
                return as_type(value, part, where)
            except ValueError:
                continue
    elif origin is Literal:
        if any(value == one and type(value) is type(one) for one in parts):
            return value
    elif origin in (tuple, frozenset):
        items = value if isinstance(value, (list, tuple)) else () if value is None else (value,)
        return origin(as_type(item, parts[0], where) for item in items)
    elif origin is Mapping and isinstance(value, Mapping):
        return {as_type(key, parts[0], where): as_type(item, parts[1], f"{where}.{key}") for key, item in value.items()}
    elif hint is float:
        if type(value) in (int, float) and abs(value) <= 1e300:
            return float(value)
    elif type(value) is hint:
        return value
    raise ValueError(f"{where} is {reprlib.repr(value)}, not {getattr(hint, '__name__', hint)}")


@functools.cache
def _hints(cls: type[Any]) -> Mapping[str, Any]:
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in fields(cls)}
