"""Paired comparisons: McNemar's exact test against scipy, intervals that resample targets, and their power."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import binomtest

from query_mutator.stats.paired import (
    cluster_correlation,
    compare_pairs,
    design_effect,
    detectable_difference,
    mcnemar_p,
    questions_needed,
)


@pytest.mark.parametrize("gained", [0, 1, 3, 8, 40, 700])
@pytest.mark.parametrize("lost", [0, 1, 5, 40, 41, 500])
def test_mcnemar_is_the_two_sided_binomial_test_of_the_discordant_pairs(gained: int, lost: int) -> None:
    known = binomtest(gained, gained + lost).pvalue if gained + lost else 1.0
    assert mcnemar_p(gained, lost) == pytest.approx(known, rel=1e-9)


def test_thousands_of_discordant_pairs_are_counted_exactly() -> None:
    assert mcnemar_p(10_000, 10_000) == 1.0
    assert mcnemar_p(5_200, 4_800) == pytest.approx(binomtest(5_200, 10_000).pvalue, rel=1e-9)


def test_counts_and_difference_by_hand() -> None:
    ours, theirs = [1, 1, 1, 0, 0, math.nan, 1], [0, 0, 1, 1, 0, 1, math.nan]
    found = compare_pairs(ours, theirs, list("abcdefg"))
    assert (found.gained, found.lost, found.same_right, found.same_wrong, found.unscored) == (2, 1, 1, 1, 2)
    assert (found.questions, found.difference, found.p) == (5, pytest.approx(0.2), 1.0)
    assert not found.is_clear


def test_the_first_ones_gains_are_the_others_losses() -> None:
    rng = np.random.default_rng(0)
    ours, theirs = (rng.integers(2, size=60).astype(float) for _ in range(2))
    targets = [str(number % 20) for number in range(60)]
    there, back = compare_pairs(ours, theirs, targets), compare_pairs(theirs, ours, targets)
    assert (there.gained, there.lost, there.p) == (back.lost, back.gained, back.p)
    assert there.interval == pytest.approx((-back.interval[1], -back.interval[0]))


def test_questions_about_one_target_are_not_independent() -> None:
    ours, theirs = [1.0] * 24 + [0.0] * 8 + [1.0] * 32, [0.0] * 24 + [1.0] * 8 + [1.0] * 32
    apart = compare_pairs(ours, theirs, [str(number) for number in range(64)])
    together = compare_pairs(ours, theirs, [str(number // 8) for number in range(64)])
    assert apart.difference == together.difference == 0.25
    assert (apart.is_clear, together.is_clear) == (True, False)  # 8 targets: three gained, one lost
    assert apart.p == together.p < 0.01


def test_no_common_question_says_nothing() -> None:
    for found in (compare_pairs([], [], []), compare_pairs([math.nan, 1.0], [1.0, math.nan], ["a", "b"])):
        assert (found.questions, found.interval, found.p) == (0, (-1.0, 1.0), 1.0)
        assert math.isnan(found.difference)


def test_lists_of_unequal_length_are_refused() -> None:
    with pytest.raises(ValueError, match="1 outcomes are paired with 2 and 2 targets"):
        compare_pairs([1.0], [1.0, 0.0], ["a", "b"])


def test_few_targets_decide_little() -> None:
    gained, lost = [1.0] * 12 + [0.0] * 8, [0.0] * 19 + [1.0]
    assert compare_pairs(gained, lost, ["a"] * 20).interval == (-1.0, 1.0)
    two = compare_pairs(gained, lost, ["a"] * 10 + ["b"] * 10)
    assert not two.is_clear
    many = compare_pairs(gained, lost, [str(number) for number in range(20)])
    assert many.is_clear


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
