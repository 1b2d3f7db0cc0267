"""Tests for a handful of seeds: permutation and Welch tests, Holm's correction, and the effect n seeds can detect."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from query_mutator.stats.intervals import student_t, welch

__all__ = ["Permutation", "holm", "minimum_detectable_effect", "permutation_test", "pooled_spread", "welch_p"]

_EXACT_UP_TO = 200_000  # splits that are enumerated
_DRAWN = 50_000  # splits drawn where there are more
_POWER = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Permutation:
    """A two-sided permutation test of a difference of means: its p value and the smallest possible one."""

    p: float
    smallest: float
    exact: bool


def permutation_test(ours: Sequence[float], theirs: Sequence[float]) -> Permutation:
    """Test a difference of means over all splits of the pooled values, or over drawn ones where there are too many."""
    pooled, n, m = np.array([*ours, *theirs], dtype=np.float64), len(ours), len(theirs)
    total = math.comb(n + m, n)
    exact = total <= _EXACT_UP_TO
    rows = _all_splits(n + m, n) if exact else _drawn_splits(n + m, n)
    sums = pooled[rows].sum(axis=1)
    differences = np.abs(sums / n - (pooled.sum() - sums) / m)
    observed = abs(float(np.mean(ours)) - float(np.mean(theirs)))
    hits = int((differences >= observed - 1e-12 * max(1.0, observed)).sum())
    smallest = (2 if n == m else 1) / total
    return Permutation(p=hits / total if exact else (hits + 1) / (len(rows) + 1), smallest=smallest, exact=exact)


def welch_p(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the two-sided p value of Welch's test; 1 with fewer than two values on a side."""
    from scipy.stats import t

    difference, error, degrees = welch(ours, theirs)
    if not math.isfinite(error):
        return 1.0
    if error == 0:
        return 1.0 if difference == 0 else 0.0
    return float(2 * t.sf(abs(difference) / error, degrees))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p values corrected for the number of comparisons (Holm 1979)."""
    corrected, highest = [0.0] * len(p_values), 0.0
    for rank, (at, p) in enumerate(sorted(enumerate(p_values), key=lambda found: found[1])):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p))
        corrected[at] = highest
    return corrected


def minimum_detectable_effect(n: int, m: int, *, spread: float = 1.0) -> float:
    """Return the difference of means that a two-sided 5 % t test of n against m values detects with 80 % power.

    `spread` is the standard deviation within a group; infinite with fewer than three values in all.
    """
    from scipy.optimize import brentq
    from scipy.stats import ncf

    degrees = n + m - 2
    if n < 1 or m < 1 or degrees < 1:
        return math.inf
    critical, scale = student_t(degrees), math.sqrt(1 / n + 1 / m)

    def missing_power(effect: float) -> float:
        # t² is noncentral F; the noncentral t itself is NaN for some large effects in scipy.
        return float(ncf.sf(critical**2, 1, degrees, (effect / scale) ** 2)) - _POWER

    high = 1.0
    while missing_power(high) < 0:
        high *= 2
    return spread * float(brentq(missing_power, 1e-9, high, xtol=1e-6))


def pooled_spread(*groups: Sequence[float]) -> float:
    """Return the standard deviation within groups; NaN when no group has two values."""
    several = [group for group in groups if len(group) > 1]
    degrees = sum(len(group) - 1 for group in several)
    squares = sum(float(np.var(group, ddof=1)) * (len(group) - 1) for group in several)
    return math.sqrt(squares / degrees) if degrees else math.nan


@lru_cache(maxsize=16)
def _all_splits(total: int, first: int) -> NDArray[np.int64]:
    return np.array(list(combinations(range(total), first)), dtype=np.int64)


def _drawn_splits(total: int, first: int) -> NDArray[np.int64]:
    draws = np.random.default_rng(0).random((_DRAWN, total))
    return np.asarray(np.argpartition(draws, first, axis=1)[:, :first])
