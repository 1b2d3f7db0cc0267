"""Scores of probabilities: Brier's, the area under the ROC curve, reliability, calibration error."""

from __future__ import annotations

import math

import numpy as np

from query_mutator.stats.intervals import Floats


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
