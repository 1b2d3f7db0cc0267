"""Fields of a config: their bounds, which stand in the annotations, defaults that a subclass changes, and their flags.

lr: Annotated[float, Gt(0), Le(10)] = 3e-4        any type with `annotated_types`, within a union or a tuple as well

`function_of` makes them the arguments of a function, which cyclopts reads from a command line.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le
from cyclopts import App, CoercionError, Parameter
from cyclopts.argument import ArgumentCollection
from docstring_parser import parse_from_object

C = TypeVar("C")
SHOWN_CHARACTERS = 60

#: `App(default_parameter=...)`: several values after a flag, and the last one of a flag that is given twice.
DEFAULTS = Parameter(consume_multiple=True, allow_repeating=True, negative_iterable=())


@dataclasses.dataclass(frozen=True, slots=True)
class Bounds:
    """The least and the largest value of a number."""

    low: float = -math.inf
    high: float = math.inf
    above_low: bool = False  # the least value is itself not allowed

    def __contains__(self, value: float) -> bool:
        return (
            (self.low < value if self.above_low else self.low <= value)
            and value <= self.high
            and (isinstance(value, int) or math.isfinite(value))
        )

    def wanted(self, value: float) -> str:
        """Return what a number has to be that is not `value`, in words."""
        if math.isinf(self.low) and math.isinf(self.high):
            return "a finite number"
        if self.low >= -1 and self.high <= 1 and not self.above_low:
            return f"between {self.low:g} and {self.high:g}"
        if value > self.low:
            return f"at most {_whole(self.high)}"
        return f"{'above' if self.above_low else 'at least'} {_whole(self.low)}"


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
def rules_of(cls: type[Any]) -> Mapping[str, tuple[Bounds, Matches | None]]:
    """Return the bounds of each field of a dataclass, and the pattern that its text has to match."""
    found = {}
    for name, hint in get_type_hints(cls, include_extras=True).items():
        bounds: dict[str, Any] = {}
        pattern = None
        for item in metadata_of(hint):
            match item:
                case Ge(ge):
                    bounds["low"] = ge
                case Gt(gt):
                    bounds |= {"low": gt, "above_low": True}
                case Le(le):
                    bounds["high"] = le
                case Matches():
                    pattern = item
        found[name] = Bounds(**bounds), pattern
    return found


def metadata_of(hint: Any) -> Iterator[Any]:
    """Yield what annotations hold within a type: in its outermost layer, in a union, in a tuple."""
    yield from getattr(hint, "__metadata__", ())
    for part in get_args(hint)[: 1 if hasattr(hint, "__metadata__") else None]:
        yield from metadata_of(part)


def check_fields(cls: type[Any], values: Mapping[str, Any], names: Mapping[str, str] | None = None) -> None:
    """Raise a ValueError for the first of a dataclass's `values` that is out of its bounds or does not match.

    None passes; each element of a tuple is checked. `names` has the words for a field where it is not its name.
    """
    rules = rules_of(cls)  # type: ignore[arg-type]  # mypy: a class is hashable
    for field in dataclasses.fields(cls):
        value, (bounds, pattern) = values[field.name], rules[field.name]
        for one in value if isinstance(value, tuple) else (value,):
            if isinstance(one, (int, float)) and not isinstance(one, bool) and one not in bounds:
                hint = "" if field.default in (None, dataclasses.MISSING) else f"; the default is {field.default}"
                name = (names or {}).get(field.name, field.name).lstrip("-").replace("-", "_")
                raise ValueError(f"{name}={shown(one)} must be {bounds.wanted(one)}{hint}")
            if isinstance(one, str) and pattern and not re.fullmatch(pattern.pattern, one):
                raise ValueError(f"{(names or {}).get(field.name, field.name)} {shown(one)} {pattern.fault}")


def shown(value: object) -> str:
    """Return a value for a message, not at full length."""
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…"


def _whole(number: float) -> str:
    return str(int(number)) if number == int(number) else f"{number:g}"


def function_of(
    cls: type[Any], shown: Mapping[str, Mapping[str, Any]] | None = None, *, positional: Sequence[str] = ()
) -> Callable[..., dict[str, Any]]:
    """Return a function of the fields of a dataclass, which returns those that are given.

    `shown` has what cyclopts' `Parameter` says of a field. Bounds are left out: the dataclass checks them.
    """
    hints, arguments = get_type_hints(cls, include_extras=True), []
    for field in dataclasses.fields(cls):
        own = [item for item in metadata_of(hints[field.name]) if isinstance(item, Parameter)]
        about = Parameter(**(shown or {}).get(field.name, {}))
        arguments.append(
            inspect.Parameter(
                field.name,
                inspect.Parameter.POSITIONAL_ONLY if field.name in positional else inspect.Parameter.KEYWORD_ONLY,
                annotation=Annotated[_plain(hints[field.name]), *own, about],
                default=inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default,
            )
        )
    order = [*(shown or {})]
    arguments.sort(key=lambda one: (one.kind, order.index(one.name) if one.name in order else len(order)))

    def given(*first: Any, **values: Any) -> dict[str, Any]:
        values |= zip((one.name for one in arguments), first, strict=False)
        return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}

    given.__signature__ = inspect.Signature(arguments)  # type: ignore[attr-defined]
    return given


def docs_of(cls: type[Any]) -> dict[str, tuple[str, type[Any]]]:
    """Return by field the docstring under it, and the class that declares it."""
    owners = [one for one in reversed(cls.__mro__) if dataclasses.is_dataclass(one)]
    found = [(one, owner) for owner in owners for one in parse_from_object(owner).params]
    return {one.arg_name: (" ".join((one.description or "").split()), owner) for one, owner in found}


def whole_numbers(_app: App, _commands: Sequence[str], arguments: ArgumentCollection) -> None:
    """Refuse 1.5 for a whole number, which cyclopts rounds; an entry of its `App(config=...)`."""
    for argument in (one for one in arguments if _has_int(one.hint)):
        for token in argument.tokens:
            if not re.fullmatch(r"[+-]?\d+|none|", token.value.lower()):
                raise CoercionError(argument=argument, token=token, target_type=int)


def _has_int(hint: Any) -> bool:
    return hint is int or any(map(_has_int, get_args(hint)))


def _plain(hint: Any) -> Any:
    """Return a type without what annotates it and its parts."""
    if hasattr(hint, "__metadata__"):
        return _plain(hint.__origin__)
    if type(None) in get_args(hint):
        return Union[tuple(map(_plain, get_args(hint)))]  # noqa: UP007  # of types that are only known here
    if get_origin(hint) is tuple:
        return tuple[tuple(map(_plain, get_args(hint)))]  # type: ignore[misc]
    return hint
