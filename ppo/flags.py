"""The fields of a dataclass as the arguments of a function, which cyclopts reads from a command line."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from cyclopts import App, CoercionError, Parameter
from cyclopts.argument import ArgumentCollection
from docstring_parser import parse_from_object

from ppo.fields import metadata_of

#: `App(default_parameter=...)`: several values after a flag, and the last one of a flag that is given twice.
DEFAULTS = Parameter(consume_multiple=True, allow_repeating=True, negative_iterable=())


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
