"""95 % intervals over questions: Wilson's for rates, Student's for means and paired differences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

Z95 = 1.959963984540054
Interval = tuple[float, float]


def wilson_interval(successes: int, n: int) -> Interval:
    """Return the Wilson score interval of a rate (E. B. Wilson, 1927), which stays honest at 0 and 1."""
    if n == 0:
        return 0.0, 1.0
    rate = successes / n
    centre = (rate + Z95**2 / (2 * n)) / (1 + Z95**2 / n)
    half = Z95 / (1 + Z95**2 / n) * math.sqrt(rate * (1 - rate) / n + Z95**2 / (4 * n**2))
    return max(0.0, centre - half), min(1.0, centre + half)


def mean_interval(values: Sequence[float]) -> Interval:
    """Return the t interval of a mean; with fewer than two values it is the whole line."""
    if len(values) < 2:
        return -math.inf, math.inf
    array = np.asarray(values, dtype=np.float64)
    half = student_t95(len(array) - 1) * float(array.std(ddof=1)) / math.sqrt(len(array))
    return float(array.mean()) - half, float(array.mean()) + half


def paired_interval(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """Return the t interval of the mean difference of two lists over the same questions."""
    return mean_interval(np.subtract(ours, theirs).tolist())


@lru_cache(maxsize=64)
def student_t95(degrees: int) -> float:
    """Return the two-sided 95 % quantile of Student's t."""
    from scipy.stats import t

    return float(t.ppf(0.975, degrees))
