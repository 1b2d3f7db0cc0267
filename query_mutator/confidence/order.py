"""In which order forms are asked, by P(right) that is out of fold."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from query_mutator.confidence.crossfit import TrainingTable
from query_mutator.confidence.submission import submitted
from query_mutator.types import DoubleArray

_PRIOR_QUESTIONS = 20.0  # on which a form adds nothing


def greedy_order(
    table: TrainingTable, p: DoubleArray, forms: Sequence[str], *, first: str, agreement: float, most: int | None = None
) -> list[str]:
    """Return at most `most` forms of a table in an order chosen one by one, by out-of-fold P(right) [n]."""
    chosen = [first]
    while (rest := [form for form in forms if form not in chosen]) and (most is None or len(chosen) < most):
        chosen.append(max(rest, key=lambda form: _gain(table, p, [*chosen, form], agreement=agreement)))
    return chosen


def places_by_question(table: TrainingTable, forms: Sequence[str]) -> list[list[int]]:
    """Return the rows of each question that was asked in all of these forms, in their order."""
    order = {form: place for place, form in enumerate(forms)}
    places: dict[int, list[int]] = {}
    for at in np.flatnonzero(np.isin(table.forms, forms)).tolist():
        places.setdefault(int(table.questions[at]), []).append(at)
    whole = (rows for rows in places.values() if len(rows) == len(forms) == len({table.forms[at] for at in rows}))
    return [sorted(rows, key=lambda at: order[table.forms[at]]) for rows in whole]


def _gain(table: TrainingTable, p: DoubleArray, forms: Sequence[str], *, agreement: float) -> float:
    """Return what the last form adds to the rate of right submissions where all were asked, drawn to 0 where few."""

    def right(rows: Sequence[int]) -> float:
        chosen = submitted(p[rows], table.answer_groups[rows].tolist(), agreement=agreement)
        return float(table.right[rows[chosen]])

    gains = [right(rows) - right(rows[:-1]) for rows in places_by_question(table, forms)]
    return sum(gains) / (len(gains) + _PRIOR_QUESTIONS) if gains else -math.inf
