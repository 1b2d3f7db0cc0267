"""Aggregates over several tasks (Agarwal et al. 2021): interquartile mean, its interval, probability of improvement."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from query_mutator.stats.intervals import WHOLE_LINE, Floats, Interval, student_t

__all__ = ["interquartile_mean", "probability_of_improvement", "stratified_interval"]

_RESAMPLES = 2000


def interquartile_mean(values: Sequence[float] | Floats) -> float:
    """Return the mean of the middle half of all runs of all tasks; NaN without any."""
    flat = np.ravel(np.asarray(values, dtype=np.float64))
    return float(_middle_means(flat)) if len(flat) else math.nan


def _middle_means(rows: Floats) -> Floats:
    """Return the mean of the middle half of each row [..., n]."""
    from scipy.stats import trim_mean

    means: Floats = trim_mean(rows, 0.25, axis=-1)
    return means


def stratified_interval(tasks: Sequence[Sequence[float]]) -> Interval:
    """Return the 95 % bootstrap interval of the interquartile mean; runs are resampled within each task.

    Resampling n runs shows (n - 1)/n of their variance, and few runs know it roughly: at three per task the plain
    interval covers 85 %. So it is widened as Student's t widens that of a mean. The whole line unless every task has
    two runs and all values are finite.
    """
    arrays = [np.asarray(task, dtype=np.float64) for task in tasks]
    if not arrays or any(len(task) < 2 or not np.isfinite(task).all() for task in arrays):
        return WHOLE_LINE
    rng = np.random.default_rng(0)
    drawn = [rng.choice(task, (_RESAMPLES, len(task))) for task in arrays]
    means = _middle_means(np.concatenate(drawn, axis=1))
    low, high = np.quantile(means, [0.025, 0.975])
    center = interquartile_mean(np.concatenate(arrays))
    degrees = sum(len(task) - 1 for task in arrays)
    wider = math.sqrt(1 + len(arrays) / degrees) * student_t(degrees) / student_t(math.inf)
    return center - wider * (center - float(low)), center + wider * (float(high) - center)


def probability_of_improvement(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> float:
    """Return the probability that one of our runs exceeds one of theirs on a task; ties count half, mean over tasks.

    NaN when a task has no run on either side, or a value is NaN.
    """
    each = []
    for a, b in zip(ours, theirs, strict=True):
        pairs = [(x > y) + 0.5 * (x == y) for x in a for y in b]
        each.append(float(np.mean(pairs)) if pairs and not np.isnan([*a, *b]).any() else math.nan)
    return float(np.mean(each)) if each else math.nan
