"""The patterns and words of the readers, which `patterns.toml` has by file and name."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources


class Patterns:
    """The compiled patterns of a file, by name."""

    def __init__(self, file: str) -> None:
        self._file = file

    def __getattr__(self, name: str) -> re.Pattern[str]:
        try:
            found = self.__dict__[name] = re.compile(table(self._file, name))
        except KeyError:
            raise AttributeError(f"patterns.toml has no {name} of {self._file}") from None
        return found


def word_list(file: str, name: str) -> list[str]:
    """Return words that the file has separated by blanks."""
    return table(file, name).split()


def table(file: str, name: str) -> str:
    """Return a text of patterns.toml."""
    return _tables()[file][name]


@cache
def _tables() -> Mapping[str, Mapping[str, str]]:
    text = (resources.files("query_mutator") / "reading" / "patterns.toml").read_text(encoding="utf8")
    return tomllib.loads(text)
