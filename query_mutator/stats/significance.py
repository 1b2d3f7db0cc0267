"""Tests for a handful of seeds: permutation and Welch tests, Holm's correction, and the effect n seeds can detect."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from query_mutator.stats.intervals import moments, student_t, welch, welch_degrees

_EXACT_UP_TO = 200_000  # splits that are enumerated
_DRAWN = 50_000  # splits drawn where there are more
_NUMBERS_AT_ONCE = 4_000_000  # of drawn splits in memory
_POWER = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Permutation:
    """A two-sided permutation test of a difference of means: its p value and the smallest possible one."""

    p: float
    smallest: float
    exact: bool


def permutation_test(ours: Sequence[float], theirs: Sequence[float]) -> Permutation | None:
    """Test a difference of means over all splits of the pooled values, or over drawn ones where there are too many.

    None when either side has no value, or one is not finite. scipy's test refuses a single value and takes 11 times as
    long (docs/log.md).
    """
    pooled, n, m = np.array([*ours, *theirs], dtype=np.float64), len(ours), len(theirs)
    if not n or not m or not np.isfinite(pooled).all():
        return None
    total = math.comb(n + m, n)
    exact = total <= _EXACT_UP_TO
    center, size = float(pooled.mean() if np.ptp(pooled) else pooled[0]), float(np.abs(pooled).max())
    pooled = pooled - center
    scale = float(np.abs(pooled).max()) or 1.0
    pooled = pooled / scale  # sums of large values would overflow
    # Splits are as far apart as the observed one up to the rounding of the values.
    tolerance = 1e-12 + 8 * np.finfo(np.float64).eps * size / scale
    observed = abs(float(np.mean(pooled[:n])) - float(np.mean(pooled[n:])))
    hits = drawn = 0
    for rows in [_all_splits(n + m, n)] if exact else _drawn_splits(n + m, n):
        sums = pooled[rows].sum(axis=1)
        differences = np.abs(sums / n - (pooled.sum() - sums) / m)
        hits += int((differences >= observed - tolerance).sum())
        drawn += len(rows)
    smallest = (2 if n == m else 1) / total
    return Permutation(p=hits / total if exact else (hits + 1) / (drawn + 1), smallest=smallest, exact=exact)


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


@lru_cache(maxsize=16)
def _all_splits(total: int, first: int) -> NDArray[np.int64]:
    return np.array(list(combinations(range(total), first)), dtype=np.int64)


def _drawn_splits(total: int, first: int) -> Iterator[NDArray[np.int64]]:
    """Yield drawn splits in parts of some megabytes."""
    rng = np.random.default_rng(0)
    rows = max(1, min(_DRAWN, _NUMBERS_AT_ONCE // total))
    for start in range(0, _DRAWN, rows):
        draws = rng.random((min(rows, _DRAWN - start), total))
        yield np.asarray(np.argpartition(draws, first, axis=1)[:, :first])
