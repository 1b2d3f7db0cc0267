"""Power of a paired comparison: published sample sizes, and the powers of simulated evaluations."""

from __future__ import annotations

import math

import numpy as np
import pytest

from query_mutator.stats.paired import (
    cluster_correlation,
    design_effect,
    detectable_difference,
    questions_needed,
)


@pytest.mark.parametrize(
    ("lost", "gained", "pairs"),
    [
        (0.05, 0.45, 23),  # powerandsamplesize.com, "McNemar's Z-test, 2-Sided Equality", after Connor (1987), page 209
        (0.15, 0.30, 155),  # clinicaltrials-tools.vercel.app, "McNemar's test sample size", Connor (1987)
    ],
)
def test_questions_needed_are_the_published_ones(lost: float, gained: float, pairs: int) -> None:
    assert questions_needed(gained - lost, discordant=gained + lost) == pairs


@pytest.mark.parametrize("discordant", [0.05, 0.25, 1.0])
@pytest.mark.parametrize("n", [60, 687, 20_000])
@pytest.mark.parametrize("design", [1.0, 1.7])
def test_that_many_questions_show_the_difference(n: int, discordant: float, design: float) -> None:
    least = detectable_difference(n, discordant=discordant, design=design)
    if least > discordant:
        assert n < questions_needed(discordant, discordant=discordant, design=design)
    else:
        assert questions_needed(least, discordant=discordant, design=design) == pytest.approx(n, abs=1)


@pytest.mark.parametrize("n", [0, 1, 3, 8])
def test_a_handful_of_questions_shows_nothing(n: int) -> None:
    assert detectable_difference(n, discordant=1 / 3) == math.inf


@pytest.mark.parametrize(("difference", "discordant"), [(0.0, 0.3), (-0.1, 0.3), (0.31, 0.3), (0.5, 1.1)])
def test_differences_that_cannot_be_are_refused(difference: float, discordant: float) -> None:
    with pytest.raises(ValueError, match="needs methods that differ"):
        questions_needed(difference, discordant=discordant)


@pytest.mark.parametrize(("n", "discordant"), [(100, 0.5), (687, 0.25), (5000, 0.1)])
def test_four_of_five_simulated_evaluations_show_the_detectable_difference(n: int, discordant: float) -> None:
    least = detectable_difference(n, discordant=discordant)
    shares = ((discordant + least) / 2, (discordant - least) / 2, 1 - discordant)
    gained, lost, _ = np.random.default_rng(0).multinomial(n, shares, 20_000).T
    shown = np.abs(gained - lost) > 1.96 * np.sqrt(gained + lost)
    assert shown.mean() == pytest.approx(0.8, abs=0.02)


def clustered(n: int, *, size: int, correlation: float, draws: int) -> tuple[np.ndarray, list[str]]:
    """Return differences [draws, n] of -1, 0 and 1, and targets [n] that have `size` questions each.

    A question has its target's own difference with the probability whose square is the correlation.
    """
    rng = np.random.default_rng(1)
    own, common = (rng.choice([-1, 0, 0, 1], (draws, count)) for count in (n, n // size))
    follows = rng.random((draws, n)) < math.sqrt(correlation)
    return np.where(follows, np.repeat(common, size, axis=1), own), [str(number // size) for number in range(n)]


def test_the_design_effect_is_that_of_simulated_targets() -> None:
    differences, targets = clustered(240, size=4, correlation=0.3, draws=5000)
    design = design_effect(targets, correlation=0.3)
    assert design == pytest.approx(1.9)
    assert 240 * differences.mean(axis=1).var() / differences.var() == pytest.approx(design, rel=0.05)
    found = [cluster_correlation(row, targets) for row in differences[:400].astype(float)]
    assert np.mean(found) == pytest.approx(0.3, abs=0.02)


def test_targets_of_unequal_size_by_hand() -> None:
    assert design_effect(["a", "a", "a", "b"], correlation=1.0) == pytest.approx(10 / 4)
    assert design_effect(["a", "b"], correlation=0.5) == 1
    assert design_effect([], correlation=0.5) == 1
    assert cluster_correlation(np.array([1.0, 1, -1, -1]), list("aabb")) == 1
    assert cluster_correlation(np.array([1.0, -1, 1, -1]), list("aabb")) == 0
    assert math.isnan(cluster_correlation(np.array([1.0, -1]), list("ab")))
    assert math.isnan(cluster_correlation(np.zeros(4), list("aabb")))
