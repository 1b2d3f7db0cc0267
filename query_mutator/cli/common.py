"""What commands share: the flag --json, how results are printed, and progress bars."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol, TypeVar

from query_mutator.cli.console import progress
from query_mutator.cli.flags import JsonTo
from query_mutator.cli.outputs import OutputFlags, write_report
from query_mutator.files import encode

__all__ = ["JsonFlags", "longest_allowed", "parse_edges", "rows_of", "show", "with_bar"]

T = TypeVar("T")

OVERFLOW_MAX = 2048
LONGEST_EDGE = 10**9  # tokens, as every other length on a command line


@dataclass(frozen=True, kw_only=True)
class JsonFlags(OutputFlags):
    """Base of the flags of every command that reports something."""

    json: JsonTo = None
    """Write the result as JSON to FILE; without FILE, or with -, print it in place of text."""


class HasJson(Protocol):
    """Flags with --json [FILE]."""

    @property
    def json(self) -> str | None:
        """Return where to write the result."""


def show(flags: HasJson, data: Mapping[str, Any], text: str) -> None:
    """Print a result as `text`, or with `--json -` as one JSON object; `--json FILE` also writes the object."""
    print(encode(data).decode() if flags.json == "-" else text)
    if flags.json not in (None, "-"):
        write_report(flags.json, data)


def rows_of(pairs: Mapping[str, object]) -> str:
    """Return names and values as lines in two columns."""
    width = max(map(len, pairs))
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in pairs.items())


def parse_edges(text: str, *, flag: str = "--bucket-edges") -> tuple[int, ...]:
    """Return the numbers of `128,256,512`; ValueError unless they are whole, above 0 and increasing."""
    try:
        edges = tuple(int(part) for part in text.replace(",", " ").split())
    except ValueError:
        edges = ()
    if not edges or edges[0] < 1 or any(left >= right for left, right in pairwise(edges)):
        raise ValueError(f"{flag} {text!r} must be increasing whole numbers, as in 128,256,512")
    if edges[-1] > LONGEST_EDGE:
        raise ValueError(f"{flag} {text!r}: the last number must be at most {LONGEST_EDGE}")
    return edges


def longest_allowed(overflow_max: int | None, edges: tuple[int, ...]) -> int:
    """Return the longest length allowed, by default 2048 or the last edge; ValueError for one below the last edge."""
    if overflow_max is not None and overflow_max < edges[-1]:
        raise ValueError(f"--overflow-max {overflow_max} is below the last of --bucket-edges, {edges[-1]}; raise it")
    return max(OVERFLOW_MAX, edges[-1]) if overflow_max is None else overflow_max


def with_bar(name: str, total: int, work: Callable[[Callable[[], object]], T], *, unit: str = "row") -> T:
    """Return what `work` returns; it is given a function to call after every one of `total` things."""
    with progress(name, total, unit=unit) as bar:
        return work(bar.update)
