"""gymnasium's vectorized infos: one dict of arrays for n infos, and rows of it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["as_arrays", "infos_of", "rows_of", "valid_mask"]


def as_arrays(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return an info with its numbers as arrays of no dimension, which gymnasium, SB3 and torchrl's reader take."""
    return {key: value if isinstance(value, dict) else np.asarray(value) for key, value in info.items()}


def infos_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one dict of arrays [n] for n infos; `_key` [n] says which of them have the key, as gymnasium does."""
    infos: dict[str, Any] = {}
    for key in dict.fromkeys(itertools.chain.from_iterable(rows)):
        present = [key in row for row in rows]
        infos[key] = _column(key, [row.get(key) for row in rows], sample=rows[present.index(True)][key])
        infos[f"_{key}"] = np.array(present)
    return infos


def _column(key: str, values: list[Any], *, sample: Any) -> Any:
    if isinstance(sample, dict):
        return infos_of([value or {} for value in values])
    if type(sample) in (int, float, bool):
        return np.array([value or 0 for value in values], dtype=type(sample))
    if isinstance(sample, np.ndarray) and key != "final_obs":
        return np.stack([np.zeros_like(sample) if value is None else value for value in values])
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
    valid: NDArray[np.bool_] = infos["valid"]
    if "final_info" in infos:
        valid = np.where(infos["_final_info"], infos["final_info"]["valid"], valid)
    return valid
