"""Aggregates over several tasks (Agarwal et al. 2021): interquartile mean, its interval, probability of improvement."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from query_mutator.stats.intervals import Floats, Interval

__all__ = ["interquartile_mean", "probability_of_improvement", "stratified_interval"]

_RESAMPLES = 2000


def interquartile_mean(values: Sequence[float] | Floats) -> float:
    """Return the mean of the middle half of all runs of all tasks."""
    from scipy.stats import trim_mean

    return float(trim_mean(np.ravel(values), 0.25))


def stratified_interval(tasks: Sequence[Sequence[float]]) -> Interval:
    """Return the 95 % bootstrap interval of the interquartile mean; runs are resampled within each task."""
    from scipy.stats import trim_mean

    rng = np.random.default_rng(0)
    drawn = [rng.choice(np.asarray(task, dtype=np.float64), (_RESAMPLES, len(task))) for task in tasks]
    means = trim_mean(np.concatenate(drawn, axis=1), 0.25, axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def probability_of_improvement(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> float:
    """Return the probability that a run of ours exceeds one of theirs on a task; ties count half, mean over tasks."""
    each = []
    for a, b in zip(ours, theirs, strict=True):
        differences = np.subtract.outer(np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64))
        each.append(float((differences > 0).mean() + 0.5 * (differences == 0).mean()))
    return float(np.mean(each))
