"""Bounds of settings: kinds of numbers and texts for annotations, and the base of the settings groups.

`check_values` holds for flags, files and programs: `parse_flags` calls it with what it read, every settings group
calls it when it is made. Upper bounds are far above what is useful: they catch slips and units.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any, TypeVar

from ppo.config import Device, Share, Weight
from ppo.fields import Free, Ge, Gt, Le, Matches, check_values, defaults

__all__ = [
    "Cosine", "Count", "CountOrNone", "Device", "Duration", "Few", "FewOrNone", "Ge", "Group", "Le", "Matches",
    "Megabytes", "Million", "Norm", "Parallel", "Port", "Positive", "Prose", "Rate", "Retries", "Seconds", "Seed",
    "Share", "Sigma", "Size", "Steps", "Threads", "Tokens", "Wait", "Weight", "check_values", "defaults", "group_of",
    "text_of",
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


Prose = Annotated[str, Free()]  # several lines, or empty words of another command
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


def text_of(given: str, flag: str) -> str:
    """Return the text of the file that a flag names; a text, which has a line break, stays: a resumed run has that.

    ValueError for an unreadable or empty file.
    """
    if not given or "\n" in given:
        return given
    try:
        text = Path(given).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise ValueError(f"{flag} {given[:200]} cannot be read ({error}); give a file of UTF-8 text") from None
    if not text:
        raise ValueError(f"{flag} {given} is empty; write the text that models are to get, or leave it out")
    return text + "\n"
