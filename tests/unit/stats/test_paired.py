"""Paired comparisons: McNemar's exact test against scipy, counts worked by hand, intervals that resample targets."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import binomtest

from query_mutator.stats.paired import compare_pairs, mcnemar_p


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
