"""Statistics at the numbers of seeds that runs have, against known values and by simulation."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import scipy.stats

from query_mutator.stats import intervals, significance, tasks

seeds_interval = partial(intervals.mean_interval, bootstrap_from=intervals.BOOTSTRAP_FROM)


def test_intervals_of_a_mean_by_number_of_values() -> None:
    assert seeds_interval([1.0]) == (-math.inf, math.inf)
    low, high = seeds_interval([1.0, 2.0, 3.0])
    assert (low, high) == pytest.approx((2 - 4.302653 / math.sqrt(3), 2 + 4.302653 / math.sqrt(3)), abs=1e-5)
    skewed = np.random.default_rng(0).lognormal(0, 1, 40)
    low, high = seeds_interval(skewed.tolist())
    assert high - skewed.mean() > skewed.mean() - low  # the bootstrap sees the skew, t would not


@pytest.mark.parametrize("n", [3, 5, 10])
def test_the_t_interval_covers_what_it_says(n: int) -> None:
    draws = np.random.default_rng(n).normal(1.0, 2.0, (4000, n))
    covered = [low <= 1.0 <= high for low, high in map(seeds_interval, draws.tolist())]
    assert 0.92 <= np.mean(covered) <= 0.97


def test_welch_is_scipy_s() -> None:
    ours, theirs = [1.0, 2.0, 4.0, 4.5], [3.0, 9.0, 5.0]
    expected = scipy.stats.ttest_ind(ours, theirs, equal_var=False)
    interval = expected.confidence_interval(0.95)
    assert significance.welch_p(ours, theirs) == pytest.approx(expected.pvalue)
    assert intervals.welch_interval(ours, theirs) == pytest.approx((interval.low, interval.high))
    assert intervals.welch_interval([1.0], theirs) == (-math.inf, math.inf)
    assert significance.welch_p([1.0], theirs) == 1.0


def test_the_permutation_test_is_exact_and_tells_how_small_it_could_get() -> None:
    apart = significance.permutation_test([1, 2, 3], [4, 5, 6])
    assert (apart.p, apart.smallest, apart.exact) == (0.1, 0.1, True)
    ours, theirs = [1.0, 5.0, 4.0, 8.0], [3.0, 9.0, 7.0, 6.5]
    expected = scipy.stats.permutation_test(
        (ours, theirs), lambda a, b: abs(np.mean(a) - np.mean(b)), n_resamples=np.inf, alternative="greater"
    )
    assert significance.permutation_test(ours, theirs).p == pytest.approx(expected.pvalue)
    assert not significance.permutation_test(range(20), range(1, 21)).exact


def test_holm_against_numbers_worked_by_hand() -> None:
    assert significance.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert significance.holm([0.9, 0.8]) == [1.0, 1.0]
    assert significance.holm([]) == []


@pytest.mark.parametrize(("n", "effect"), [(3, 3.07), (5, 2.02), (10, 1.32), (20, 0.91)])
def test_the_smallest_effect_that_can_be_seen_with_80_per_cent_power(n: int, effect: float) -> None:
    assert significance.minimum_detectable_effect(n, n) == pytest.approx(effect, abs=0.005)
    assert significance.minimum_detectable_effect(1, 1) == math.inf


def test_two_seeds_against_one_have_a_smallest_effect_too() -> None:
    # At one degree of freedom 80 % of |Z| lie below 1.2816, so the shift is 12.706 * 1.2816 = 16.28 (plus a little).
    assert significance.minimum_detectable_effect(2, 1) == pytest.approx(16.3 * math.sqrt(1.5), rel=0.01)


def test_the_spread_within_groups() -> None:
    assert significance.pooled_spread([1.0, 3.0], [10.0, 12.0], [5.0]) == pytest.approx(math.sqrt(2))
    assert math.isnan(significance.pooled_spread([1.0], [2.0]))


def test_several_tasks_together() -> None:
    values = [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]]
    assert tasks.interquartile_mean(values) == 3.5
    low, high = tasks.stratified_interval(values)
    assert 2.0 < low < 3.5 < high < 5.0
    assert tasks.probability_of_improvement(values, values) == 0.5
    assert tasks.probability_of_improvement([[2.0], [2.0]], [[1.0, 2.0], [3.0]]) == (0.75 + 0.0) / 2
