"""What values a setting may have: kinds of numbers and texts for annotations, and the one function that checks them.

`check_values` holds for flags, files and programs alike: `parse_flags` calls it with what it read, every settings group
calls it when it is made. Upper bounds are far above what is useful: they catch slips and units.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

from annotated_types import Ge, Gt, Le

from ppo.config import Device, Share, Weight
from ppo.fields import Matches, check_fields, defaults, metadata_of, shown

__all__ = [
    "Cosine", "Count", "CountOrNone", "Device", "Duration", "Few", "FewOrNone", "Group", "Megabytes", "Million",
    "Norm", "Parallel", "Port", "Positive", "Prose", "Rate", "Retries", "Seconds", "Seed", "Share", "Sigma", "Size",
    "Steps", "Threads", "Tokens", "Wait", "Weight", "check_values", "defaults", "group_of",
]  # fmt: skip

# Counts; `OrNone` allows 0 as well.
Count = Annotated[int, Ge(1), Le(10**9)]
CountOrNone = Annotated[int, Ge(0), Le(10**9)]
Few = Annotated[int, Ge(1), Le(10**5)]
FewOrNone = Annotated[int, Ge(0), Le(10**5)]
Million = Annotated[int, Ge(1), Le(10**6)]
Size = Annotated[int, Ge(1), Le(10**7)]
Tokens = Annotated[int, Ge(1), Le(10**8)]
Steps = Annotated[int, Ge(1), Le(10**12)]
Parallel = Annotated[int, Ge(1), Le(10**4)]  # things at once
Retries = Annotated[int, Ge(0), Le(10**4)]
Threads = Annotated[int, Ge(1), Le(1024)]
Port = Annotated[int, Ge(0), Le(65_535)]
Seed = Annotated[int, Ge(0), Le(2**32 - 1)]
# Measures
Seconds = Annotated[float, Gt(0), Le(1e7)]  # 1e7 s are 115 days
Wait = Annotated[float, Ge(0), Le(1e7)]
Megabytes = Annotated[float, Ge(0.001), Le(2000)]
Cosine = Annotated[float, Ge(-1), Le(1)]
Sigma = Annotated[float, Ge(0), Le(10)]
Rate = Annotated[float, Gt(0), Le(10)]
Positive = Annotated[float, Gt(0), Le(1e6)]
Norm = Annotated[float, Gt(0), Le(1e12)]


G = TypeVar("G", bound="Group")


class Free:
    """Annotation of a text that a person writes as they like: several lines, or empty words of another command."""


Prose = Annotated[str, Free()]
MOST_CHARACTERS, MOST_PROSE = 4096, 100_000
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_SURROGATE = re.compile(r"[\ud800-\udfff]")
#: As Ollama reads keep_alive.
Duration = Annotated[
    str, Matches(r"-?(\d+|(\d+(\.\d+)?(ms|s|m|h))+)", "is not a time; try 30m, or -1 to keep the model loaded")
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """Base of the settings groups: an invalid value is a ValueError that says what is valid."""

    def __post_init__(self) -> None:
        check_values(type(self), vars(self))
        if after := getattr(super(), "__post_init__", None):  # groups are combined by inheriting from several
            after()

    @property
    def given(self) -> frozenset[str]:
        """Return the fields that a flag or a file set; of an instance that a program made, those it changed."""
        parsed: frozenset[str] | None = vars(self).get("_given")
        if parsed is not None:
            return parsed
        return frozenset(one.name for one in dataclasses.fields(self) if getattr(self, one.name) != one.default)


def group_of(cls: type[G], *configs: object, **others: Any) -> G:
    """Return the group `cls` with the values that larger configs have for its fields, and with `others`.

    Of two configs the later one wins; a field that none has is left at its default.
    """
    names = [one.name for one in dataclasses.fields(cls) if one.name not in others]
    found = {name: getattr(config, name) for config in configs for name in names if hasattr(config, name)}
    return cls(**found | others)


def check_values(cls: type[Any], values: Mapping[str, Any], names: Mapping[str, str] | None = None) -> None:
    """Raise a ValueError for the first field of a dataclass whose value is beyond reason.

    `names` are the flags of the fields, for the message. None passes; each element of a tuple is checked.
    """
    prose = _prose(cls)  # type: ignore[arg-type]  # mypy: a class is hashable
    for field in dataclasses.fields(cls):
        value, name = values[field.name], (names or {}).get(field.name, field.name)
        if value == () and isinstance(field.default, tuple) and isinstance(next(iter(field.default), None), int):
            raise ValueError(f"{name} needs at least one value")
        for one in value if isinstance(value, tuple) else (value,):
            if isinstance(one, (str, Path)) and (fault := _fault(field, str(one), is_prose=field.name in prose)):
                raise ValueError(f"{name} {shown(str(one))} {fault}")
    check_fields(cls, values, names)


@functools.cache
def _prose(cls: type[Any]) -> frozenset[str]:
    hints = get_type_hints(cls, include_extras=True)
    return frozenset(name for name, hint in hints.items() if any(isinstance(item, Free) for item in metadata_of(hint)))


def _fault(field: dataclasses.Field[Any], text: str, *, is_prose: bool) -> str:
    """Return what is wrong with a text, "" if nothing is."""
    if _SURROGATE.search(text):
        return "is not valid UTF-8; write it again"
    if is_prose:
        if "\0" in text:
            return "has a NUL character; leave it out"
        return f"is longer than {MOST_PROSE} characters" if len(text) > MOST_PROSE else ""
    if not text.strip():
        return "" if field.default == "" and not text else "is empty; give a value, or leave the flag out"
    if _CONTROL.search(text):
        return "has a control character; leave it out"
    return f"is longer than {MOST_CHARACTERS} characters" if len(text) > MOST_CHARACTERS else ""
