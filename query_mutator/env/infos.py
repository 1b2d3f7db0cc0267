"""gymnasium's vectorized infos: one dict of arrays for n infos, and rows of it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["infos_of", "rows_of", "valid_mask"]


def infos_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one dict of arrays [n] for n infos; `_key` [n] says which of them have the key, as gymnasium does."""
    infos: dict[str, Any] = {}
    for key in dict.fromkeys(itertools.chain.from_iterable(rows)):
        present = [key in row for row in rows]
        infos[key] = _column([row.get(key) for row in rows], sample=rows[present.index(True)][key])
        infos[f"_{key}"] = np.array(present)
    return infos


def _column(values: list[Any], *, sample: Any) -> Any:
    if isinstance(sample, dict):
        return infos_of([value or {} for value in values])
    if type(sample) in (int, float, bool):
        return np.array([value or 0 for value in values], dtype=type(sample))
    column = np.empty(len(values), dtype=object)
    if isinstance(sample, str):
        column[:] = values
    else:  # one by one: numpy would merge arrays of equal length into one of more dimensions
        for row, value in enumerate(values):
            column[row] = value
    return column


def rows_of(infos: Mapping[str, Any], rows: NDArray[np.int64] | NDArray[np.bool_]) -> dict[str, Any]:
    """Return the given rows of every array of infos, nested dicts included."""
    return {key: rows_of(value, rows) if isinstance(value, dict) else value[rows] for key, value in infos.items()}


def valid_mask(infos: Mapping[str, Any]) -> NDArray[np.bool_]:
    """Return which steps [n] are valid (no call failed for good); for an ended episode `final_info` has the flag."""
    continuing, ended = infos.get("valid", False), infos.get("final_info", {}).get("valid", False)
    return np.asarray(continuing | ended, dtype=np.bool_)
