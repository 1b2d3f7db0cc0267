"""Intervals of rates over questions that come in clusters: questions about one target succeed and fail together.

    n questions, K columns, C clusters

Whole clusters are resampled, the same ones for all columns of a draw (10,000 draws, percentiles). A bootstrap of values
that are all equal has no width although more questions would show some; then Wilson's interval of a rate is used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from query_mutator.stats.intervals import Floats, Interval, wilson_interval

__all__ = ["DRAWS", "crossed_intervals", "mean_intervals", "rate_intervals"]

DRAWS = 10_000
_NUMBERS_AT_ONCE = 4_000_000  # weights in memory
_PERCENTILES = (2.5, 97.5)


def mean_intervals(values: Floats, clusters: Sequence[str]) -> Floats:
    """Return the bootstrap intervals [K, 2] of the means of columns [n, K]; NaN marks a question that does not count.

    The whole line for a column without a value.
    """
    if not len(values):
        return np.tile((-math.inf, math.inf), (values.shape[1], 1))
    intervals = crossed_intervals(values[None], clusters)
    intervals[np.isnan(values).all(axis=0)] = (-math.inf, math.inf)
    return intervals


def rate_intervals(values: Floats, clusters: Sequence[str]) -> list[Interval]:
    """Return the intervals of the rates of columns [n, K] of 0, 1, NaN; Wilson's where the bootstrap has no width."""
    found: list[Interval] = []
    for column, (low, high) in zip(values.T, mean_intervals(values, clusters).tolist(), strict=True):
        hits, n = int(np.nansum(column)), int((~np.isnan(column)).sum())
        found.append((low, high) if low < high < math.inf else wilson_interval(hits, n))
    return found


def crossed_intervals(values: Floats, clusters: Sequence[str]) -> Floats:
    """Return the bootstrap intervals [K, 2] of the means of columns [S, n, K] over S seeds and n questions.

    Seeds and, independently, clusters of questions are resampled, the same ones for all columns of a draw. NaN marks a
    question that does not count, in all seeds of a column.
    """
    counted = ~np.isnan(values)
    _, cluster = np.unique(np.asarray(clusters), return_inverse=True)
    seeds, _, columns = values.shape
    sums = np.zeros((seeds, cluster.max() + 1, 2 * columns))  # [S, C, 2 K] sums of values, then numbers of them
    both = np.concatenate([np.where(counted, values, 0.0), counted], axis=2)
    for of_seed, rows in zip(sums, both, strict=True):
        np.add.at(of_seed, cluster, rows)
    total, means = sums.sum(axis=(0, 1)), np.empty((DRAWS, columns))
    usual = np.divide(total[:columns], total[columns:], out=np.full(columns, math.nan), where=total[columns:] > 0)
    rng = np.random.default_rng(0)
    of_seeds = rng.multinomial(seeds, np.full(seeds, 1 / seeds), size=DRAWS)  # [draws, S]
    for start in range(0, DRAWS, size := max(1, _NUMBERS_AT_ONCE // sums.shape[1])):
        draws = of_seeds[start : start + size]
        weights = rng.multinomial(sums.shape[1], np.full(sums.shape[1], 1 / sums.shape[1]), size=len(draws))
        drawn = sum(draws[:, [seed]] * (weights @ of_seed) for seed, of_seed in enumerate(sums))
        means[start : start + size] = np.divide(
            drawn[:, :columns], drawn[:, columns:], out=np.tile(usual, (len(draws), 1)), where=drawn[:, columns:] > 0
        )
    return np.percentile(means, _PERCENTILES, axis=0).T
