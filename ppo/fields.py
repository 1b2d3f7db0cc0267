"""Fields of a config: bounds in annotations, defaults that a subclass changes, and command-line flags.

lr: Annotated[float, Gt(0), Le(10)] = 3e-4        any type with bounds, within a union or a tuple as well

`function_of` makes them the arguments of a function, which cyclopts reads from a command line.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from cyclopts import App, CoercionError, Parameter
from cyclopts.argument import ArgumentCollection
from docstring_parser import parse_from_object

C = TypeVar("C")
SHOWN_CHARACTERS = 60
MOST_CHARACTERS, MOST_PROSE = 4096, 100_000
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_SURROGATE = re.compile(r"[\ud800-\udfff]")

#: `App(default_parameter=...)`: several values after a flag, and the last one of a flag that is given twice.
DEFAULTS = Parameter(consume_multiple=True, allow_repeating=True, negative_iterable=())


#: How a number is compared with its limit; NaN breaks every bound.
_KEEPS = {"at least": operator.ge, "above": operator.gt, "at most": operator.le}


@dataclasses.dataclass(frozen=True, slots=True)
class Bound:
    """Annotation of a number that is `words` the limit, as "at least" it."""

    words: str
    limit: float


Ge, Gt, Le = (functools.partial(Bound, words) for words in _KEEPS)


@dataclasses.dataclass(frozen=True, slots=True)
class Matches:
    """Annotation of a text that must fully match a pattern; `fault` says what is wrong with a text that does not."""

    pattern: str
    fault: str


class Free:
    """Annotation of free text: it may have several lines, or be empty."""


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
def rules_of(cls: type[Any]) -> Mapping[str, tuple[Any, ...]]:
    """Return the annotations (Bound, Matches, Free) of each field of a dataclass."""
    return {name: tuple(metadata_of(hint)) for name, hint in get_type_hints(cls, include_extras=True).items()}


def metadata_of(hint: Any) -> Iterator[Any]:
    """Yield the annotations within a type: in its outermost layer, in a union, in a tuple."""
    yield from getattr(hint, "__metadata__", ())
    for part in get_args(hint)[: 1 if hasattr(hint, "__metadata__") else None]:
        yield from metadata_of(part)


def check_values(cls: type[Any], values: Mapping[str, Any], names: Mapping[str, str] | None = None) -> None:
    """Raise a ValueError for the first of a dataclass's `values` that is out of range or breaks an annotation.

    None passes; each element of a tuple is checked. `names` overrides the names of fields in messages.
    """
    rules = rules_of(cls)  # type: ignore[arg-type]  # mypy: a class is hashable
    for field in dataclasses.fields(cls):
        value, name = values[field.name], (names or {}).get(field.name, field.name)
        if value == () and isinstance(field.default, tuple) and isinstance(next(iter(field.default), None), int):
            raise ValueError(f"{name} needs at least one value; the default is {field.default}")
        for one in value if isinstance(value, tuple) else (value,):
            if isinstance(one, (str, Path)):
                fault = _fault(str(one), rules[field.name], may_be_empty=field.default == "")
                if fault:
                    raise ValueError(f"{name} {shown(str(one))} {fault}")
            elif wanted := _wanted(one, rules[field.name]):
                hint = "" if field.default in (None, dataclasses.MISSING) else f"; the default is {field.default}"
                name = name.lstrip("-").replace("-", "_")
                raise ValueError(f"{name}={shown(one)} must be {wanted}{hint}")


def _wanted(value: Any, rules: Sequence[Any]) -> str:
    """Return the first bound that a number breaks, in words; "" if it breaks none, and for other values."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number:
        return ""
    for rule in rules:
        if isinstance(rule, Bound) and not _KEEPS[rule.words](value, rule.limit):
            return f"{rule.words} {rule.limit:.15g}"
    return "" if isinstance(value, int) or math.isfinite(value) else "a finite number"


def _fault(text: str, rules: Sequence[Any], *, may_be_empty: bool) -> str:
    """Return what is wrong with a text, "" if nothing is."""
    is_free = any(isinstance(rule, Free) for rule in rules)
    most = MOST_PROSE if is_free else MOST_CHARACTERS
    if _SURROGATE.search(text):
        return "is not valid UTF-8; write it again"
    if not is_free and not text.strip():
        return "" if may_be_empty and not text else "is empty; give a value, or leave the flag out"
    if "\0" in text if is_free else _CONTROL.search(text):
        return "has a control character; leave it out"
    if len(text) > most:
        return f"is longer than {most} characters"
    patterns = (rule for rule in rules if isinstance(rule, Matches))
    return next((rule.fault for rule in patterns if not re.fullmatch(rule.pattern, text)), "")


def shown(value: object) -> str:
    """Return a value for a message, shortened."""
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…"


def function_of(
    cls: type[Any],
    shown: Mapping[str, Mapping[str, Any]] | None = None,
    kinds: Mapping[str, Any] | None = None,
) -> Callable[..., dict[str, Any]]:
    """Return a function with the fields of a dataclass as parameters, which returns the values that were given.

    `shown` has arguments of cyclopts' `Parameter` per field, `kinds` the kinds of `inspect.Parameter`. Bounds are left
    out: the dataclass checks them.
    """
    hints, arguments = get_type_hints(cls, include_extras=True), []
    for field in dataclasses.fields(cls):
        own = [item for item in metadata_of(hints[field.name]) if isinstance(item, Parameter)]
        about = Parameter(**(shown or {}).get(field.name, {}))
        arguments.append(
            inspect.Parameter(
                field.name,
                (kinds or {}).get(field.name, inspect.Parameter.KEYWORD_ONLY),
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
    """Return for each field the docstring under it, and the class that declares it."""
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
    """Return a type without its annotations."""
    if hasattr(hint, "__metadata__"):
        return _plain(hint.__origin__)
    if type(None) in get_args(hint):
        return Union[tuple(map(_plain, get_args(hint)))]  # noqa: UP007  # of types that are only known here
    if get_origin(hint) is tuple:
        return tuple[tuple(map(_plain, get_args(hint)))]  # type: ignore[misc]
    return hint
