"""95 % confidence intervals: Wilson's for rates, Student's t and the BCa bootstrap for means, Welch's for differences.

With n values, the bootstrap interval of a mean covers about 74 % at n = 3, 84 % at 5 and 91 % at 10, the t interval
93 to 96 %. So `mean_interval` uses t unless a caller whose values are skewed (returns of seeds) asks for the bootstrap
from some n on; evaluation over questions keeps t at every n.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "BOOTSTRAP_FROM", "WHOLE_LINE", "Floats", "Interval", "mean_interval", "paired_interval", "student_t", "welch",
    "welch_interval", "wilson_interval",
]  # fmt: skip

Floats = NDArray[np.float64]
Interval = tuple[float, float]

WHOLE_LINE: Interval = (-math.inf, math.inf)
BOOTSTRAP_FROM = 20  # seeds; with fewer the bootstrap covers too little
_Z95 = 1.959963984540054
_RESAMPLES = 2000


def wilson_interval(successes: int, n: int) -> Interval:
    """Return the Wilson score interval of a rate (E. B. Wilson, 1927), which stays accurate at 0 and 1."""
    if n == 0:
        return 0.0, 1.0
    rate = successes / n
    center = (rate + _Z95**2 / (2 * n)) / (1 + _Z95**2 / n)
    half = _Z95 / (1 + _Z95**2 / n) * math.sqrt(rate * (1 - rate) / n + _Z95**2 / (4 * n**2))
    return max(0.0, center - half), min(1.0, center + half)


def mean_interval(
    values: Sequence[float], *, bootstrap_from: int | None = None, bounds: Interval = WHOLE_LINE
) -> Interval:
    """Return the t interval of a mean, or the BCa bootstrap interval from `bootstrap_from` values on.

    The interval lies within `bounds`, the least and greatest possible value. Equal values show no spread; with finite
    bounds one value at each of them is added, as Bonett and Price (2012) do for rates. `bounds` if fewer than two
    values are given or one is not finite.
    """
    array = np.asarray(values, dtype=np.float64)
    if len(array) < 2 or not np.isfinite(array).all():
        return bounds
    if np.ptp(array) == 0 and np.isfinite(bounds).all():
        array = np.append(array, bounds)
    if bootstrap_from is not None and len(array) >= bootstrap_from and np.ptp(array) > 0:
        low, high = _bca_interval(array)
    else:
        half = student_t(len(array) - 1) * float(array.std(ddof=1)) / math.sqrt(len(array))
        low, high = float(array.mean()) - half, float(array.mean()) + half
    return max(bounds[0], low), min(bounds[1], high)


def paired_interval(ours: Sequence[float], theirs: Sequence[float], *, bounds: Interval = WHOLE_LINE) -> Interval:
    """Return the t interval of the mean difference of two lists over the same questions; `bounds` of a difference."""
    return mean_interval(np.subtract(ours, theirs).tolist(), bounds=bounds)


def welch_interval(ours: Sequence[float], theirs: Sequence[float], *, level: float = 0.95) -> Interval:
    """Return Welch's interval of mean(ours) - mean(theirs), which does not assume equal variances."""
    difference, error, degrees = welch(ours, theirs)
    if not math.isfinite(error):
        return WHOLE_LINE
    half = student_t(degrees, level=level) * error if error else 0.0
    return difference - half, difference + half


def welch(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """Return the difference of means, its standard error and Welch's degrees of freedom.

    The error is infinite when either side has fewer than two values.
    """
    if len(ours) < 2 or len(theirs) < 2:
        return math.nan, math.inf, math.nan
    a, b = np.asarray(ours, dtype=np.float64), np.asarray(theirs, dtype=np.float64)
    difference = float(a.mean() - b.mean())
    va, vb = float(a.var(ddof=1)) / len(a), float(b.var(ddof=1)) / len(b)
    if va + vb == 0:
        return difference, 0.0, 1.0
    degrees = (va + vb) ** 2 / (va**2 / (len(a) - 1) + vb**2 / (len(b) - 1))  # Welch-Satterthwaite
    return difference, math.sqrt(va + vb), degrees


@lru_cache(maxsize=256)
def student_t(degrees: float, *, level: float = 0.95) -> float:
    """Return the two-sided quantile of Student's t."""
    from scipy.stats import t

    return float(t.ppf((1 + level) / 2, degrees))


def _bca_interval(values: Floats) -> Interval:
    """Return the bias-corrected and accelerated bootstrap interval of a mean (Efron 1987)."""
    from scipy.stats import bootstrap

    rng = np.random.default_rng(0)
    found = bootstrap((values,), np.mean, confidence_level=0.95, n_resamples=_RESAMPLES, method="BCa", rng=rng)
    return float(found.confidence_interval.low), float(found.confidence_interval.high)
