"""What commands share: the flag --json, and how results are printed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from query_mutator.cli.flags import JsonTo
from query_mutator.cli.outputs import OutputFlags, write_report
from query_mutator.files import encode

__all__ = ["JsonFlags", "parse_edges", "rows_of", "show"]

LONGEST_EDGE = 10**9  # tokens, as every other length on a command line


@dataclass(frozen=True, kw_only=True)
class JsonFlags(OutputFlags):
    """Base of the flags of every command that reports something."""

    json: JsonTo = None
    """Write the result as JSON to FILE; without FILE, or with -, print it in place of text."""


def show(flags: JsonFlags, data: Mapping[str, Any], text: str) -> None:
    """Print a result as `text`, or with `--json -` as one JSON object; `--json FILE` also writes the object."""
    print(encode(data).decode() if flags.json == "-" else text)
    if flags.json not in (None, "-"):
        write_report(flags.json, data)


def rows_of(pairs: Mapping[str, object]) -> str:
    """Return names and values as lines in two columns."""
    width = max(map(len, pairs))
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in pairs.items())


def parse_edges(text: str) -> tuple[int, ...]:
    """Return the numbers of `128,256,512`; ValueError unless they are whole, above 0 and increasing."""
    try:
        edges = tuple(int(part) for part in text.replace(",", " ").split())
    except ValueError:
        edges = ()
    if not edges or edges[0] < 1 or any(left >= right for left, right in pairwise(edges)):
        raise ValueError(f"--bucket-edges {text!r} must be increasing whole numbers, as in 128,256,512")
    if edges[-1] > LONGEST_EDGE:
        raise ValueError(f"--bucket-edges {text!r}: the last number must be at most {LONGEST_EDGE}")
    return edges
