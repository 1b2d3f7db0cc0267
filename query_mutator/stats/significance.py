"""Tests for a handful of seeds: Welch tests, Holm's correction, and the effect n seeds can detect."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from query_mutator.stats.intervals import moments, student_t, welch, welch_degrees

_POWER = 0.8


def welch_p(ours: Sequence[float], theirs: Sequence[float], *, noise: float = 0.0) -> float:
    """Return the two-sided p value of Welch's test, 1 where no variance can be estimated; `noise` as in `welch`."""
    from scipy.stats import norm, t

    difference, error, degrees = welch(ours, theirs, noise=noise)
    if not math.isfinite(error) or not math.isfinite(difference):
        return 1.0
    ratio = abs(difference) / error
    return float(2 * (norm.sf(ratio) if math.isinf(degrees) else t.sf(ratio, degrees)))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p values corrected for the number of comparisons (Holm 1979); ValueError for a number outside 0 to 1.

    scipy has Benjamini and Hochberg's correction only.
    """
    if not all(0 <= p <= 1 for p in p_values):
        raise ValueError(f"{list(p_values)} are not p values")
    corrected, highest = [0.0] * len(p_values), 0.0
    for rank, (at, p) in enumerate(sorted(enumerate(p_values), key=lambda found: found[1])):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p))
        corrected[at] = highest
    return corrected


def equivalence_p(ours: Sequence[float], theirs: Sequence[float], margin: float, *, noise: float = 0.0) -> float:
    """Return the p value that the means differ by `margin` or more (two one-sided tests, Schuirmann 1987).

    1 where no variance can be estimated; `noise` as in `welch`.
    """
    from scipy.special import ndtr, stdtr

    difference, error, degrees = welch(ours, theirs, noise=noise)
    if not math.isfinite(error) or not math.isfinite(difference):
        return 1.0
    ratio = (abs(difference) - margin) / error
    return float(ndtr(ratio) if math.isinf(degrees) else stdtr(degrees, ratio))


def minimum_detectable_effect(n: int, m: int, *, spreads: tuple[float, float] = (1.0, 1.0)) -> float:
    """Return the difference of means that Welch's test of n against m values detects at 5 % with 80 % power.

    `spreads` are the standard deviations of the two groups; one value has none, so the groups then share the greater
    one. Infinite with fewer than three values in all, NaN without a spread or with one of 0, which says nothing about
    the noise.
    """
    from scipy.optimize import brentq
    from scipy.stats import ncf

    if n < 1 or m < 1 or n + m < 3:
        return math.inf
    if min(n, m) < 2:
        spreads = (max(spreads), max(spreads))
    variances = (spreads[0] ** 2, spreads[1] ** 2)
    if not 0 < sum(variances) < math.inf:
        return math.nan
    degrees = float(n + m - 2) if min(n, m) < 2 else welch_degrees(n, m, variances=variances)
    critical, scale = student_t(degrees), math.sqrt(variances[0] / n + variances[1] / m)

    def missing_power(ratio: float) -> float:
        # t² is noncentral F; the noncentral t itself is NaN for some large effects in scipy.
        return float(ncf.sf(critical**2, 1, degrees, ratio**2)) - _POWER

    high = 1.0
    while missing_power(high) < 0:
        high *= 2
    return scale * float(brentq(missing_power, 1e-9, high, xtol=1e-6))


def pooled_spread(*groups: Sequence[float]) -> float:
    """Return the standard deviation within groups; NaN when no group has two values."""
    several = [group for group in groups if len(group) > 1]
    degrees = sum(len(group) - 1 for group in several)
    variances = [moments(np.asarray(group, dtype=np.float64))[1] for group in several]
    return (
        math.sqrt(sum(v * (len(g) - 1) / degrees for v, g in zip(variances, several, strict=True)))
        if degrees
        else math.nan
    )
