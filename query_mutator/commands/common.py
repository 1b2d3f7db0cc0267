"""What the commands share: flags that mean the same everywhere, how results are printed, how settings are checked."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from query_mutator.batching.generation.rows import Tokenizer

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class JsonFlags:
    """Base of the flags of every command that reports something."""

    json: bool = False
    """Print one JSON object in place of text."""


def show(flags: JsonFlags, data: Mapping[str, Any], text: str) -> None:
    """Print a result: `data` as one JSON object with --json, else `text`."""
    print(json.dumps(data, ensure_ascii=False) if flags.json else text)


def rows_of(pairs: Mapping[str, object]) -> str:
    """Return names and values as lines in two columns."""
    width = max(map(len, pairs))
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in pairs.items())


def parse_edges(text: str, *, flag: str = "--bucket-edges") -> tuple[int, ...]:
    """Return the numbers of `128,256,512`; ValueError unless they are whole, above 0 and rising."""
    try:
        edges = tuple(int(part) for part in text.replace(",", " ").split())
    except ValueError:
        edges = ()
    if not edges or edges[0] < 1 or any(left >= right for left, right in pairwise(edges)):
        raise ValueError(f"{flag} {text!r} must be rising whole numbers, as in 128,256,512")
    return edges


def check_at_least(lowest: int, **values: int | None) -> None:
    """Raise a ValueError that names the first flag whose value is below `lowest`."""
    for name, value in values.items():
        if value is not None and value < lowest:
            raise ValueError(f"--{name.replace('_', '-')} {value} must be at least {lowest}")


def settings_errors() -> AbstractContextManager[None]:
    """Turn the first ValidationError of a settings record into a UsageError of one line."""
    from query_mutator.batching import records

    return records.settings_errors()


def tokenizer_of(spec: str) -> Tokenizer:
    """Return the tokenizer of --tokenizer: a folder, a hub id, or `bytes`."""
    from query_mutator.batching.tokenizers import load_tokenizer

    tokenizer: Tokenizer = load_tokenizer(spec)
    return tokenizer


def with_bar(name: str, total: int, work: Callable[[Callable[[], object]], T], *, unit: str = "row") -> T:
    """Return what `work` returns; it is given a function to call after every one of `total` things."""
    from query_mutator.cli.console import progress

    with progress(name, total, unit=unit) as bar:
        return work(bar.update)
