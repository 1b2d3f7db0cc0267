"""Fields of a config: their bounds, which stand in the annotations, and defaults that a subclass changes.

lr: Annotated[float, Gt(0), Le(10)] = 3e-4        any type with `annotated_types`, within a union or a tuple as well
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, get_args, get_type_hints

from annotated_types import Ge, Gt, Le, Lt

C = TypeVar("C")
SHOWN_CHARACTERS = 60


@dataclasses.dataclass(frozen=True, slots=True)
class Bounds:
    """The least and the largest value of a number."""

    low: float = -math.inf
    high: float = math.inf
    above_low: bool = False  # the least value is itself not allowed
    below_high: bool = False

    def __contains__(self, value: float) -> bool:
        return (
            (self.low < value if self.above_low else self.low <= value)
            and (value < self.high if self.below_high else value <= self.high)
            and (isinstance(value, int) or math.isfinite(value))
        )

    def wanted(self, value: float) -> str:
        """Return what a number has to be that is not `value`, in words."""
        if math.isinf(self.low) and math.isinf(self.high):
            return "a finite number"
        if self.low >= -1 and self.high <= 1 and not self.above_low:
            return f"between {self.low:g} and {self.high:g}"
        if value > self.low:
            return f"{'below' if self.below_high else 'at most'} {_plain(self.high)}"
        return f"{'above' if self.above_low else 'at least'} {_plain(self.low)}"


@dataclasses.dataclass(frozen=True, slots=True)
class Matches:
    """Annotation of a text that has to match a pattern as a whole; `fault` says what is wrong with another."""

    pattern: str
    fault: str


def defaults(**changed: Any) -> Callable[[type[C]], type[C]]:
    """Return a class decorator that gives inherited fields other defaults; apply it below `@dataclass`."""

    def change(cls: type[C]) -> type[C]:
        hints = get_type_hints(cls, include_extras=True)
        for name, value in changed.items():
            cls.__annotations__[name] = hints[name]
            setattr(cls, name, value)
        cls.CHANGED = frozenset(changed)  # type: ignore[attr-defined]
        return cls

    return change


@functools.cache
def bounds_of(cls: type[Any]) -> Mapping[str, Bounds]:
    """Return the bounds of the fields of a dataclass."""
    hints = get_type_hints(cls, include_extras=True)
    return {field.name: _bounds([*metadata_of(hints[field.name])]) for field in dataclasses.fields(cls)}


@functools.cache
def patterns_of(cls: type[Any]) -> Mapping[str, Matches]:
    """Return the pattern of each field of a dataclass that has one."""
    found = {}
    for name, hint in get_type_hints(cls, include_extras=True).items():
        for item in metadata_of(hint):
            if isinstance(item, Matches):
                found[name] = item
    return found


def metadata_of(hint: Any) -> Iterator[Any]:
    """Yield what annotations hold within a type: in its outermost layer, in a union, in a tuple."""
    yield from getattr(hint, "__metadata__", ())
    for part in get_args(hint)[: 1 if hasattr(hint, "__metadata__") else None]:
        yield from metadata_of(part)


def _bounds(metadata: list[Any]) -> Bounds:
    found: dict[str, Any] = {}
    for item in metadata:
        if isinstance(item, (Ge, Gt)):
            found |= {"low": getattr(item, "ge", None) if isinstance(item, Ge) else item.gt}
            found |= {"above_low": isinstance(item, Gt)}
        elif isinstance(item, (Le, Lt)):
            found |= {"high": getattr(item, "le", None) if isinstance(item, Le) else item.lt}
            found |= {"below_high": isinstance(item, Lt)}
    return Bounds(**found)


def check_fields(cls: type[Any], values: Mapping[str, Any], names: Mapping[str, str] | None = None) -> None:
    """Raise a ValueError for the first of a dataclass's `values` that is out of its bounds or does not match.

    None passes; each element of a tuple is checked. `names` has the words for a field where it is not its name.
    """
    bounds, patterns = bounds_of(cls), patterns_of(cls)  # type: ignore[arg-type]  # mypy: a class is hashable
    for field in dataclasses.fields(cls):
        value = values[field.name]
        for one in value if isinstance(value, tuple) else (value,):
            if isinstance(one, (int, float)) and not isinstance(one, bool) and one not in bounds[field.name]:
                hint = "" if field.default in (None, dataclasses.MISSING) else f"; the default is {field.default}"
                name = (names or {}).get(field.name, field.name).lstrip("-").replace("-", "_")
                raise ValueError(f"{name}={shown(one)} must be {bounds[field.name].wanted(one)}{hint}")
            if isinstance(one, str) and (rule := patterns.get(field.name)) and not re.fullmatch(rule.pattern, one):
                raise ValueError(f"{(names or {}).get(field.name, field.name)} {shown(one)} {rule.fault}")


def shown(value: object) -> str:
    """Return a value for a message, not at full length."""
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…"


def _plain(number: float) -> str:
    return str(int(number)) if number == int(number) else f"{number:g}"
