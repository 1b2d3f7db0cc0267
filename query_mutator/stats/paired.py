"""Two methods on the same questions: gained, lost and same, McNemar's exact test, and the difference with its interval.

    n questions

The interval resamples what questions are about, because questions about one target succeed and fail together. The test
takes questions as independent, so with several questions per target its p is too small; the interval decides.

What n questions can show: with psi the share of the questions on which two methods differ, d the difference of success
(at most psi), rho the correlation of the differences of two questions about one target, and m questions a target,

    n = deff (z_0.975 sqrt(psi) + z_0.8 sqrt(psi - d²))² / d²,  deff = 1 + rho (Σ m² / Σ m - 1)

McNemar's test at 5 % two-sided with 80 % power: Miettinen 1968 (Biometrics 24, 339), Connor 1987 (Biometrics 43, 207);
the design effect is Kish's (1965). statsmodels has powers of independent proportions only.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from query_mutator.stats.intervals import Floats, Interval, mean_intervals, student_t, wilson_interval

FEW_CLUSTERS = 50  # with more the bootstrap's interval is 3 % too narrow at most

#: Assumed before anything was measured; above what prompts of two genuine models show (docs/log.md).
DISCORDANT, CORRELATION = 1 / 3, 0.1
_Z_TEST, _Z_POWER = NormalDist().inv_cdf(0.975), NormalDist().inv_cdf(0.8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Paired:
    """Outcomes of two methods on the same questions, from the first one's side."""

    gained: int  # right here, wrong with the other
    lost: int
    same_right: int
    same_wrong: int
    unscored: int  # by one of the two or both; in no other number
    difference: float  # of success; NaN without a question that both scored
    interval: Interval
    p: float

    @property
    def questions(self) -> int:
        """Return the number of questions that both scored."""
        return self.gained + self.lost + self.same_right + self.same_wrong

    @property
    def is_clear(self) -> bool:
        """Return whether the interval excludes 0."""
        low, high = self.interval
        return low > 0 or high < 0


def compare_pairs(
    ours: Sequence[float] | Floats,
    theirs: Sequence[float] | Floats,
    clusters: Sequence[str],
    *,
    interval: Interval | None = None,
) -> Paired:
    """Return how two columns [n] of 1 (right), 0 (wrong) and NaN (unscored) differ; `clusters` [n] are the targets.

    `interval` is that of the difference, where it is known already.
    """
    a, b = np.asarray(ours, dtype=np.float64), np.asarray(theirs, dtype=np.float64)
    if not len(a) == len(b) == len(clusters):
        raise ValueError(f"{len(a)} outcomes are paired with {len(b)} and {len(clusters)} targets; give equal numbers")
    differences = a - b
    gained, lost = int((differences > 0).sum()), int((differences < 0).sum())
    same_right = int(((a == 1) & (b == 1)).sum())
    unscored = int(np.isnan(differences).sum())
    return Paired(
        gained=gained,
        lost=lost,
        same_right=same_right,
        same_wrong=len(a) - gained - lost - same_right - unscored,
        unscored=unscored,
        difference=float(np.nanmean(differences)) if unscored < len(a) else math.nan,
        interval=difference_interval(differences, clusters) if interval is None else interval,
        p=mcnemar_p(gained, lost),
    )


def mcnemar_p(gained: int, lost: int) -> float:
    """Return the two-sided p of McNemar's exact test: both outcomes of a discordant pair are equally likely."""
    pairs = gained + lost
    ways = sum(math.comb(pairs, fewer) for fewer in range(min(gained, lost) + 1))  # exact: whole numbers
    return min(1.0, 2 * ways / (1 << pairs))


def difference_interval(differences: Floats, clusters: Sequence[str]) -> Interval:
    """Return the interval of a mean of paired differences [n] in {-1, 0, 1} and NaN.

    Where one of the two never does better, the bootstrap takes this for certain; the interval is then at least as wide
    as the square-and-add interval over clusters (Newcombe 1998): 12 points either way for 28 pairs that all agree. Of
    few clusters it makes too little, by what Student's t is wider and a variance of n smaller than one of n - 1; one
    cluster says nothing.
    """
    better = {name for name, value in zip(clusters, differences, strict=True) if value > 0}
    worse = {name for name, value in zip(clusters, differences, strict=True) if value < 0}
    n = len({name for name, value in zip(clusters, differences, strict=True) if not math.isnan(value)})
    if n < 2:
        return -1.0, 1.0
    ((drawn_low, drawn_high),) = mean_intervals(differences[:, None], clusters).tolist()
    if n < FEW_CLUSTERS:
        wider, mean = math.sqrt(n / (n - 1)) * student_t(n - 1) / student_t(math.inf), float(np.nanmean(differences))
        drawn_low = max(-1.0, mean - wider * (mean - drawn_low))
        drawn_high = min(1.0, mean + wider * (drawn_high - mean))
    if better and worse:
        return drawn_low, drawn_high
    (low_b, high_b), (low_w, high_w) = wilson_interval(len(better), n), wilson_interval(len(worse), n)
    b, w, mean = len(better) / n, len(worse) / n, float(np.nanmean(differences))
    low = mean - math.hypot(b - low_b, high_w - w)
    high = mean + math.hypot(high_b - b, w - low_w)
    return max(-1.0, min(low, drawn_low)), min(1.0, max(high, drawn_high))


def detectable_difference(n: int, *, discordant: float, design: float = 1.0) -> float:
    """Return the smallest difference that n questions show; infinite where all discordant pairs are too few for it."""
    independent = n / design
    critical, z2 = _Z_TEST * math.sqrt(discordant), _Z_POWER**2
    # The larger root of (sqrt(n) d - critical)² = z² (psi - d²).
    root = z2 * discordant * (independent + z2 - _Z_TEST**2)
    found = (critical * math.sqrt(independent) + math.sqrt(max(0.0, root))) / (independent + z2)
    return found if root > 0 and found <= discordant else math.inf


def design_effect(clusters: Sequence[str], *, correlation: float) -> float:
    """Return the variance of a mean as a multiple of that of independent questions; `clusters` [n] are targets."""
    sizes = Counter(clusters).values()
    return 1 + correlation * (sum(size**2 for size in sizes) / max(1, len(clusters)) - 1) if sizes else 1.0
