"""Agreement of verdicts with labels: Cohen's kappa (1960), rates, their 95 % intervals; scores of probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from query_mutator.stats.intervals import Floats, Interval, wilson_interval

_DRAWS = 10_000
_SEED = 0
_JEFFREYS = 0.5  # added to each count: a table with empty cells is uncertain too


def agreement(verdicts: Sequence[bool], labels: Sequence[bool]) -> dict[str, Any]:
    """Return how verdicts agree with labels of the same length: n, rates, kappa, and the interval of each.

    An empty class has the rate 0 and the interval [0, 1]. Rates have Wilson's intervals, kappa the central 95 % of its
    posterior under Jeffreys' prior of the four cells.
    """
    pairs = list(zip(verdicts, labels, strict=True))
    cells = np.array([[pairs.count((said, label)) for label in (True, False)] for said in (True, False)])
    (both_yes, false_yes), (false_no, both_no) = cells.tolist()
    hits, positives, negatives = both_yes + both_no, both_yes + false_no, both_no + false_yes
    kappa = cohen_kappa(cells)
    return {
        "n": len(pairs),
        "accuracy": hits / max(1, len(pairs)),
        "accuracy_ci": wilson_interval(hits, len(pairs)),
        "true_positive_rate": both_yes / max(1, positives),  # of the labels yes
        "true_positive_ci": wilson_interval(both_yes, positives),
        "true_negative_rate": both_no / max(1, negatives),
        "true_negative_ci": wilson_interval(both_no, negatives),
        "kappa": kappa,
        "kappa_ci": _kappa_interval(cells, kappa),
    }


def cohen_kappa(cells: np.ndarray) -> float:
    """Return kappa of a table [2, 2] of verdicts and labels: agreement beyond that of their rates by chance.

    0 where chance alone agrees always, as for a constant verdict on constant labels.
    """
    total = cells.sum()
    if total == 0:
        return 0.0
    observed = float(np.trace(cells) / total)
    chance = float((cells.sum(axis=0) * cells.sum(axis=1)).sum() / total**2)
    return (observed - chance) / (1 - chance) if chance < 1 else 0.0


def _kappa_interval(cells: np.ndarray, kappa: float) -> Interval:
    draws = np.random.default_rng(_SEED).dirichlet(cells.ravel() + _JEFFREYS, _DRAWS).reshape(-1, 2, 2)
    observed = draws[:, 0, 0] + draws[:, 1, 1]
    chance = (draws.sum(axis=1) * draws.sum(axis=2)).sum(axis=1)
    low, high = np.quantile((observed - chance) / (1 - chance), [0.025, 0.975])
    return min(float(low), kappa), max(float(high), kappa)


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
