"""Statistics that evaluation, analysis, sweeps, IQN and batching share.

1. 95 % confidence intervals: Wilson's for rates, Student's t for means, Welch's for differences of means. Bootstrap
   intervals of a mean over seeds cover less: for 20 values that are normal, heavy-tailed (t with 2 degrees of freedom)
   or contaminated, BCa covers 93, 87 and 83 %, Student's t 95, 95 and 98 % (docs/log.md). Questions come in clusters:
   whole clusters are resampled, the same ones for all columns of a draw (10,000 draws, percentiles). A bootstrap of
   values that are all equal has no width although more questions would show some; then Wilson's interval is used.
2. Two methods on the same n questions (`Paired`): gained, lost and same, McNemar's exact test, and the difference with
   its interval, which resamples what questions are about: questions about one target succeed and fail together. The
   test takes questions as independent, so with several questions per target its p is too small; the interval decides.
   What n questions can show: with psi the share of the questions on which two methods differ, d the difference of
   success (at most psi), rho the correlation of the differences of two questions about one target, and m questions a
   target,

       n = deff (z_0.975 sqrt(psi) + z_0.8 sqrt(psi - d²))² / d²,  deff = 1 + rho (Σ m² / Σ m - 1)

   McNemar's test at 5 % two-sided with 80 % power: Miettinen 1968 (Biometrics 24, 339), Connor 1987 (Biometrics 43,
   207); the design effect is Kish's (1965). statsmodels has powers of independent proportions only.
3. Tests for a handful of seeds, which load scipy: Welch tests, Holm's correction, the effect that n seeds can detect.
4. Scores of probabilities: Brier's, the area under the ROC curve, reliability, calibration error.
5. `WeightedSampler`: weighted draws.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from query_mutator.types import DoubleArray, IntArray

__all__ = [
    "DRAWS", "FEW_CLUSTERS", "FIRST_SLOTS", "WHOLE_LINE", "Floats", "Interval", "Paired", "WeightedSampler", "auroc",
    "brier_score", "compare_pairs", "crossed_intervals", "design_effect", "detectable_difference",
    "difference_interval", "equivalence_p", "expected_calibration_error", "holm", "mcnemar_p", "mean_interval",
    "mean_intervals", "minimum_detectable_effect", "moments", "pooled_spread", "rate_intervals", "reliability",
    "student_t", "welch", "welch_degrees", "welch_interval", "welch_p", "wilson_interval", "within",
]  # fmt: skip


Floats = NDArray[np.float64]
Interval = tuple[float, float]

WHOLE_LINE: Interval = (-math.inf, math.inf)
_Z95 = 1.959963984540054
_NORMAL_DEGREES = 1e6  # Student's t differs by a millionth

DRAWS = 10_000
_NUMBERS_AT_ONCE = 4_000_000  # weights in memory
_PERCENTILES = (2.5, 97.5)


def wilson_interval(successes: int, n: int) -> Interval:
    """Return the Wilson score interval of a rate (E. B. Wilson, 1927), which stays accurate at 0 and 1.

    Equal to scipy's, which takes 586 us in place of 0.55.
    """
    if not 0 <= successes <= n:
        raise ValueError(f"{successes} of {n} is not a rate")
    if n == 0:
        return 0.0, 1.0
    rate = successes / n
    center = (rate + _Z95**2 / (2 * n)) / (1 + _Z95**2 / n)
    half = _Z95 / (1 + _Z95**2 / n) * math.sqrt(rate * (1 - rate) / n + _Z95**2 / (4 * n**2))
    # At the ends the bound is exact; rounding would put it next to the rate.
    return 0.0 if successes == 0 else max(0.0, center - half), 1.0 if successes == n else min(1.0, center + half)


def mean_interval(values: Sequence[float], *, bounds: Interval = WHOLE_LINE) -> Interval:
    """Return the t interval of a mean.

    The interval lies within `bounds`, the least and greatest possible value; bounds that a value violates are ignored.
    Equal values show no spread: with finite bounds one value at each of them is added, as Bonett and Price (2012) do
    for rates. `bounds` if fewer than two values are given or one is not finite.
    """
    array = np.asarray(values, dtype=np.float64)
    if len(array) and not bounds[0] <= array.min() <= array.max() <= bounds[1]:
        bounds = WHOLE_LINE
    if len(array) < 2 or not np.isfinite(array).all():
        return bounds
    if np.ptp(array) == 0 and np.isfinite(bounds).all():
        array = np.append(array, bounds)
    mean, variance = moments(array)
    half = student_t(len(array) - 1) * math.sqrt(variance / len(array))
    return within((mean - half, mean + half), bounds)


def welch_interval(ours: Sequence[float], theirs: Sequence[float], *, noise: float = 0.0) -> Interval:
    """Return Welch's interval of mean(ours) - mean(theirs), which does not assume equal variances.

    `noise` is a known variance of the difference in addition to that of the values. The whole line where no variance
    can be estimated: fewer than two values on a side, or values that are equal on both.
    """
    difference, error, degrees = welch(ours, theirs, noise=noise)
    half = student_t(degrees) * error if math.isfinite(error) else math.inf
    return (difference - half, difference + half) if math.isfinite(half) else WHOLE_LINE


def welch(ours: Sequence[float], theirs: Sequence[float], *, noise: float = 0.0) -> tuple[float, float, float]:
    """Return the difference of means, its standard error and its degrees of freedom (`welch_degrees`).

    The error is infinite when either side has fewer than two values, a value is not finite, or nothing varies.
    """
    a, b = np.asarray(ours, dtype=np.float64), np.asarray(theirs, dtype=np.float64)
    if len(a) < 2 or len(b) < 2 or not (np.isfinite(a).all() and np.isfinite(b).all()):
        return math.nan, math.inf, math.nan
    (mean_a, var_a), (mean_b, var_b) = moments(a), moments(b)
    total = var_a / len(a) + var_b / len(b) + noise
    if not 0 < total < math.inf:
        return mean_a - mean_b, math.inf, math.nan
    degrees = welch_degrees(len(a), len(b), variances=(var_a, var_b), noise=noise)
    return mean_a - mean_b, math.sqrt(total), degrees


def welch_degrees(n: int, m: int, *, variances: tuple[float, float], noise: float = 0.0) -> float:
    """Return the Welch-Satterthwaite degrees of freedom of a difference of means of n and m values, bounded above.

    With few values in the more variable group, a variance that happens to be small gives too many degrees: 12 % false
    verdicts for 2 against 10 values, 7 % for 3 against 10. At most 1.2 degrees for a smaller group of two, else 1.5
    times its size less one, keep them at 6 % whatever the spreads (benchmarks/verdicts.py).
    """
    va, vb = variances[0] / n, variances[1] / m
    total = va + vb + noise
    # Shares of the total, because squares of small or large variances leave the range of floats.
    sum_of_squares = (va / total) ** 2 / (n - 1) + (vb / total) ** 2 / (m - 1)
    if not sum_of_squares:
        return math.inf
    fewest = min(n, m)
    most = (1.2 if fewest == 2 else 1.5) * (fewest - 1)
    return min(1 / sum_of_squares, most * (total / (va + vb)) ** 2)  # a known variance has no degrees to lose


def moments(values: Floats) -> tuple[float, float]:
    """Return mean and sample variance; exactly the value and 0 where all are equal, which rounding would hide."""
    if np.ptp(values) == 0:
        return float(values[0]), 0.0
    with np.errstate(over="ignore"):
        return float(values.mean()), float(values.var(ddof=1))


def within(interval: Interval, bounds: Interval) -> Interval:
    """Return the part of an interval within bounds; the bounds for one that is not a pair of numbers."""
    low, high = interval
    if math.isnan(low) or math.isnan(high):
        return bounds
    return min(max(bounds[0], low), bounds[1]), max(min(bounds[1], high), bounds[0])


@lru_cache(maxsize=256)
def student_t(degrees: float, *, level: float = 0.95) -> float:
    """Return the two-sided quantile of Student's t; the normal distribution's from a million degrees on.

    With t = sqrt(degrees) tan(angle) the density is a power of the cosine, which is integrated (Gauss and Legendre) and
    solved by Newton's method from the normal's quantile, which is below.
    """
    normal = NormalDist().inv_cdf((1 + level) / 2)
    if degrees > _NORMAL_DEGREES:
        return normal
    whole = math.sqrt(math.pi) / 2 * math.exp(math.lgamma(degrees / 2) - math.lgamma((degrees + 1) / 2))
    angle = math.atan(normal / math.sqrt(degrees))
    points, weights = np.polynomial.legendre.leggauss(64)
    for _ in range(50):
        inside = angle / 2 * float(weights @ np.cos(angle * (points + 1) / 2) ** (degrees - 1))
        step = (level * whole - inside) / math.cos(angle) ** (degrees - 1)
        angle += step
        if abs(step) < 1e-13:
            break
    return math.sqrt(degrees) * math.tan(angle)


def mean_intervals(values: Floats, clusters: Sequence[str]) -> Floats:
    """Return the bootstrap intervals [K, 2] of the means of columns [n, K]; NaN marks a question that does not count.

    The whole line for a column without a value.
    """
    if not len(values):
        return np.tile(WHOLE_LINE, (values.shape[1], 1))
    intervals = crossed_intervals(values[None], clusters)
    intervals[np.isnan(values).all(axis=0)] = WHOLE_LINE
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


def brier_score(p: Floats, right: Floats) -> float:
    """Return the mean squared error of probabilities [n] of outcomes [n] in {0, 1}; NaN without any."""
    return float(np.mean((p - right) ** 2)) if len(p) else math.nan


def auroc(p: Floats, right: Floats) -> float:
    """Return the probability that a right one has the higher p, ties count half; NaN if all are right or none is."""
    hits = int(right.sum())
    if hits in (0, len(right)):
        return math.nan
    _, place, counts = np.unique(p, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]
    return float((ranks[right > 0].sum() - hits * (hits + 1) / 2) / (hits * (len(right) - hits)))


def reliability(p: Floats, right: Floats, *, bins: int = 10) -> list[dict[str, float]]:
    """Return a reliability diagram, bins with equally many answers by p: their n, mean p and rate of right ones."""
    order = np.argsort(p, kind="stable")
    parts = [part for part in np.array_split(order, bins) if len(part)]
    return [{"n": len(part), "mean_p": float(p[part].mean()), "rate": float(right[part].mean())} for part in parts]


def expected_calibration_error(p: Floats, right: Floats, *, bins: int = 10) -> float:
    """Return the mean difference of p and the rate of right ones over the bins of `reliability`; NaN without any."""
    off = sum(point["n"] * abs(point["mean_p"] - point["rate"]) for point in reliability(p, right, bins=bins))
    return off / len(p) if len(p) else math.nan


FIRST_SLOTS = 64  # doubled when they are used up


class WeightedSampler:
    """Weights of slots 0, 1, 2, ..., all 0 until set, laid end to end on a line from 0 to their total."""

    def __init__(self) -> None:
        self._weights = np.zeros(FIRST_SLOTS)
        self._ends: DoubleArray | None = None  # where each weight ends on the line, None when one has changed

    @property
    def total(self) -> float:
        """Sum of all weights."""
        return float(self._cumulated()[-1])

    def __getitem__(self, slots: IntArray) -> DoubleArray:
        """Return the weights [B] of slots [B]."""
        weights: DoubleArray = self._weights[slots]
        return weights

    def set(self, slot: int, weight: float) -> None:
        """Set the weight of one slot."""
        self.update(np.array([slot]), np.array([weight]))

    def update(self, slots: IntArray, weights: DoubleArray) -> None:
        """Set the weights [B] of slots [B]; of a slot that is named twice, the last counts."""
        size = len(self._weights)
        if (needed := int(slots.max(initial=-1)) + 1) > size:
            self._weights = np.append(self._weights, np.zeros(max(needed, 2 * size) - size))
        self._weights[slots] = weights
        self._ends = None

    def find(self, points: DoubleArray) -> IntArray:
        """Return the slots [B] at points [B] of [0, total), never one of weight 0. The total must be above 0."""
        ends = self._cumulated()
        points = np.minimum(points, np.nextafter(ends[-1], 0.0))  # rounding may put a point at the very end
        return np.searchsorted(ends, points, side="right")

    def _cumulated(self) -> DoubleArray:
        if self._ends is None:
            self._ends = np.cumsum(self._weights)
        return self._ends
