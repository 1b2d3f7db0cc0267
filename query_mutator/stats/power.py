"""Power of a paired comparison: the smallest difference that n questions show, and the questions that one takes.

    psi    share of the questions on which two methods differ, the discordant pairs
    d      difference of success, at most psi
    rho    correlation of the differences of two questions about one target

    n = deff (z_0.975 sqrt(psi) + z_0.8 sqrt(psi - d²))² / d²,  deff = 1 + rho (Σ m² / Σ m - 1) for m questions a target

McNemar's test at 5 % two-sided with 80 % power: Miettinen 1968 (Biometrics 24, 339), Connor 1987 (Biometrics 43, 207);
the design effect is Kish's (1965). statsmodels has powers of independent proportions only.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

from query_mutator.stats.intervals import Floats

__all__ = [
    "CORRELATION", "DISCORDANT", "cluster_correlation", "design_effect", "detectable_difference", "questions_needed",
]  # fmt: skip

#: Assumed before anything was measured; above what prompts of two genuine models show (docs/log.md).
DISCORDANT, CORRELATION = 1 / 3, 0.1
_Z_TEST, _Z_POWER = NormalDist().inv_cdf(0.975), NormalDist().inv_cdf(0.8)


def questions_needed(difference: float, *, discordant: float, design: float = 1.0) -> int:
    """Return the number of questions that show a difference; ValueError unless 0 < difference <= discordant <= 1."""
    if not 0 < difference <= discordant <= 1:
        raise ValueError(f"a difference of {difference} needs methods that differ on {discordant} or more; at most 1")
    spread = _Z_TEST * math.sqrt(discordant) + _Z_POWER * math.sqrt(discordant - difference**2)
    return math.ceil(design * (spread / difference) ** 2)


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


def cluster_correlation(values: Floats, clusters: Sequence[str]) -> float:
    """Return the correlation of two values [n] of one cluster, at least 0; NaN without two such or without a spread."""
    _, cluster = np.unique(np.asarray(clusters), return_inverse=True)
    centered = values - values.mean()
    pairs = float((np.bincount(cluster) ** 2).sum()) - len(values)
    square = float((centered**2).sum())
    if not pairs or not square:
        return math.nan
    return max(0.0, (float((np.bincount(cluster, centered) ** 2).sum()) - square) / pairs / (square / len(values)))
