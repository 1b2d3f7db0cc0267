"""CSV as every command writes it; the only place that does."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from typing import Any, TextIO

__all__ = ["write_csv"]

#: A spreadsheet takes a cell that begins with one of these for a formula, and runs it.
FORMULA_SIGNS = ("=", "+", "-", "@", "\t", "\r")


def write_csv(out: TextIO, rows: Iterable[Sequence[Any]]) -> None:
    """Write rows; a text that a spreadsheet would run as a formula gets an apostrophe in front, as OWASP advises."""
    csv.writer(out, lineterminator="\n").writerows([_cell(value) for value in row] for row in rows)


def _cell(value: Any) -> Any:
    if isinstance(value, str) and value.startswith(FORMULA_SIGNS) and not _is_number(value):
        return f"'{value}"
    return value


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
