"""Outcomes of several seeds: rates with intervals over seeds and targets.

S seeds, n questions
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from query_mutator.data.split import target_key
from query_mutator.evaluation.methods import Found
from query_mutator.evaluation.outcomes import Outcome
from query_mutator.stats.intervals import Floats
from query_mutator.stats.paired import difference_interval
from query_mutator.stats.resampling import crossed_intervals
from query_mutator.types import Question

__all__ = ["Results", "agreeing", "crossed", "percent"]

SEEDED = ("random", "bandit", "policy")


@dataclass(frozen=True, kw_only=True)
class Results:
    """Outcomes by method (with "@SEED" for those that differ by seed) on the questions of all sets, and on others."""

    seeds: Sequence[int]
    sets: Mapping[str, Sequence[Question]]
    found: Found  # "NAME", "NAME, guard", "NAME, training"

    @property
    def keys(self) -> list[str]:
        """Return what each question [n] is about."""
        return [target_key(question) for questions in self.sets.values() for question in questions]

    def of(self, name: str, part: str = "") -> list[list[Outcome]]:
        """Return the outcomes [S][n] of a method; those of one without a seed count for each."""
        names = [f"{name}@{seed}" if name in SEEDED else name for seed in self.seeds]
        return [list(self.found[f"{one}{part}"].values()) for one in names]

    def column(self, name: str, measure: str, part: str = "") -> Floats:
        """Return a field of the outcomes [S, n]; NaN where a question is unscored."""
        return np.array(
            [[np.nan if o.error else float(getattr(o, measure)) for o in row] for row in self.of(name, part)]
        )


def crossed(results: Results, columns: Sequence[Floats]) -> list[list[float]]:
    """Return the intervals of the means of columns [S, n]; the same draws in every call."""
    return [list(interval) for interval in crossed_intervals(np.stack(columns, axis=2), results.keys).tolist()]


def agreeing(results: Results, differences: Floats) -> list[float]:
    """Return the interval of differences [S, n] that are all equal, which resampling takes for certain."""
    return list(difference_interval(differences[0], results.keys))


def percent(rate: float, interval: Sequence[float], *, sign: str = "") -> str:
    low, high = interval
    return f"{100 * rate:{sign}.1f} [{100 * low:{sign}.1f}, {100 * high:{sign}.1f}]"
