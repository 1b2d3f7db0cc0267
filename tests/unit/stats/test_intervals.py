"""Intervals and tests against values from the textbooks, scipy and direct loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats

from query_mutator.stats import intervals, significance
from query_mutator.stats.intervals import Floats, crossed_intervals, mean_interval, mean_intervals, wilson_interval

KEYS = ["a", "b", "a", "c", "c", "c", "d"]
S, N, C = 3, len(KEYS), 4


def test_wilson_matches_the_published_example() -> None:
    # R. Newcombe (1998), table I: 81 of 263, Wilson without continuity correction.
    assert wilson_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)


def test_wilson_stays_inside_and_off_the_point_at_the_ends() -> None:
    low, high = wilson_interval(28, 28)
    assert high == pytest.approx(1.0)
    assert 0.85 < low < 0.9
    assert wilson_interval(0, 0) == (0.0, 1.0)


def test_mean_interval_uses_student_t() -> None:
    low, high = mean_interval([1.0, 2.0, 3.0])
    assert (low, high) == pytest.approx((2 - 4.302653 / math.sqrt(3), 2 + 4.302653 / math.sqrt(3)), abs=1e-5)
    assert mean_interval([1.0]) == (-math.inf, math.inf)


def test_an_interval_stays_within_what_is_possible() -> None:
    low, high = mean_interval([0.9, 1.0], bounds=(0.0, 1.0))
    assert 0.0 <= low < 0.9
    assert high == 1.0
    assert mean_interval([0.5], bounds=(0.0, 1.0)) == (0.0, 1.0)
    assert mean_interval([1.0, 0.0], bounds=(-1.0, 1.0)) == (-1.0, 1.0)


def test_equal_values_are_not_certain() -> None:
    # Bonett and Price (2012) add one pair to each of the discordant cells: eight ties become a mean of 0 over ten,
    # with standard deviation sqrt(2 / 9) and 9 degrees of freedom.
    half = 2.262157 * math.sqrt(2 / 9 / 10)
    assert mean_interval([0.0] * 8, bounds=(-1.0, 1.0)) == pytest.approx((-half, half), abs=1e-6)
    low, high = mean_interval([1.0] * 8, bounds=(0.0, 1.0))
    assert (0.6 < low < 0.8, high) == (True, 1.0)
    assert mean_interval([2.0] * 8) == (2.0, 2.0)  # nothing is known about its bounds


@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_a_value_that_is_not_finite_has_no_interval(odd: float) -> None:
    assert mean_interval([odd, 1.0, 2.0]) == (-math.inf, math.inf)


def columns() -> Floats:
    """Return two methods, their difference, and the first on some of the questions [S, n, 4]."""
    rng = np.random.default_rng(7)
    ours, theirs = rng.integers(0, 2, size=(2, S, N)).astype(float)
    some = np.where(np.array(KEYS) == "c", 1.0, np.nan)
    return np.stack([ours, theirs, ours - theirs, ours * some], axis=2)


def directly(values: Floats, draws: int) -> Floats:
    """Return the means [draws, K] of a loop that copies whatever is drawn, as often as it is drawn."""
    rng = np.random.default_rng(0)
    seeds = rng.multinomial(S, [1 / S] * S, size=draws)
    clusters = rng.multinomial(C, [1 / C] * C, size=draws)
    found = []
    for of_seed, of_cluster in zip(seeds, clusters, strict=True):
        rows = [
            values[seed, row]
            for seed in range(S)
            for _ in range(of_seed[seed])
            for row, key in enumerate(KEYS)
            for _ in range(of_cluster["abcd".index(key)])
        ]
        drawn, usual = np.array(rows), np.nanmean(values, axis=(0, 1))
        missing = np.isnan(drawn).all(axis=0)
        drawn[:, missing] = usual[missing]
        found.append(np.nanmean(drawn, axis=0))
    return np.array(found)


def test_crossed_intervals_are_those_of_a_direct_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intervals, "DRAWS", 300)
    expected = np.percentile(directly(columns(), 300), (2.5, 97.5), axis=0).T
    assert crossed_intervals(columns(), KEYS) == pytest.approx(expected)


def test_draws_in_parts_are_the_same_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = crossed_intervals(columns(), KEYS)
    monkeypatch.setattr(intervals, "_NUMBERS_AT_ONCE", 4 * 999)
    assert np.array_equal(crossed_intervals(columns(), KEYS), whole)


def test_equal_seeds_add_no_width_and_unequal_ones_do() -> None:
    rng = np.random.default_rng(3)
    keys, one = [str(key) for key in range(200)], rng.integers(0, 2, size=200).astype(float)
    same = np.tile(one[:, None], (8, 1, 1))
    ((low, high),) = crossed_intervals(same, keys)
    assert (low, high) == pytest.approx(tuple(mean_intervals(one[:, None], keys)[0]), abs=0.01)
    shifts = np.where(rng.random((8, 200, 1)) < np.linspace(0, 1, 8)[:, None, None], 1.0, same)
    ((wide_low, wide_high),) = crossed_intervals(shifts, keys)
    assert wide_high - wide_low > 1.4 * (high - low)


def test_a_column_without_a_value_has_no_interval() -> None:
    values = np.full((S, N, 2), np.nan)
    values[:, :, 0] = 1.0
    intervals = crossed_intervals(values, KEYS)
    assert intervals[0].tolist() == [1.0, 1.0]
    assert np.isnan(intervals[1]).all()


@pytest.mark.parametrize("n", [3, 5, 10, 20])
def test_the_t_interval_covers_what_it_says(n: int) -> None:
    draws = np.random.default_rng(n).normal(1.0, 2.0, (4000, n))
    covered = [low <= 1.0 <= high for low, high in map(intervals.mean_interval, draws.tolist())]
    assert 0.92 <= np.mean(covered) <= 0.97


def test_welch_is_scipy_s_where_both_groups_are_large() -> None:
    rng = np.random.default_rng(0)
    ours, theirs = rng.normal(0.0, 1.0, 30).tolist(), rng.normal(0.3, 1.4, 40).tolist()
    expected = scipy.stats.ttest_ind(ours, theirs, equal_var=False)
    found = expected.confidence_interval(0.95)
    assert significance.welch_p(ours, theirs) == pytest.approx(expected.pvalue, abs=3e-3)
    assert intervals.welch_interval(ours, theirs) == pytest.approx((found.low, found.high), abs=0.01)
    assert intervals.welch_interval([1.0], theirs) == (-math.inf, math.inf)
    assert significance.welch_p([1.0], theirs) == 1.0


def test_two_one_sided_tests_are_scipy_s() -> None:
    rng = np.random.default_rng(1)
    ours, theirs = rng.normal(0.0, 1.0, 40).tolist(), rng.normal(0.1, 1.0, 40).tolist()
    shifted = [[value + side for value in ours] for side in (0.7, -0.7)]
    below = scipy.stats.ttest_ind(shifted[0], theirs, equal_var=False, alternative="greater").pvalue
    above = scipy.stats.ttest_ind(shifted[1], theirs, equal_var=False, alternative="less").pvalue
    assert significance.equivalence_p(ours, theirs, 0.7) == pytest.approx(max(below, above), abs=3e-3)
    assert significance.equivalence_p([1.0, 1.0], [1.0, 1.0], 0.7) == 1.0


@pytest.mark.parametrize(("n", "m"), [(2, 2), (2, 10), (3, 10), (10, 3), (5, 5)])
@pytest.mark.parametrize("spread", [0.3, 1.0, 4.0])
def test_few_false_verdicts_whatever_the_spreads(n: int, m: int, spread: float) -> None:
    rng = np.random.default_rng(n)
    pairs = zip(rng.normal(0, spread, (2000, n)), rng.normal(0, 1, (2000, m)), strict=True)
    false = np.mean([significance.welch_p(ours, theirs) <= 0.05 for ours, theirs in pairs])
    assert false <= 0.06 + 2 * math.sqrt(0.06 * 0.94 / 2000)


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


@pytest.mark.parametrize(("n", "effect"), [(3, 3.47), (5, 2.13), (10, 1.35), (20, 0.92)])
def test_the_smallest_effect_that_can_be_seen_with_80_per_cent_power(n: int, effect: float) -> None:
    assert significance.minimum_detectable_effect(n, n) == pytest.approx(effect, abs=0.005)
    assert significance.minimum_detectable_effect(1, 1) == math.inf


@pytest.mark.parametrize(("n", "m", "spread"), [(3, 3, 1.0), (10, 10, 1.0), (2, 10, 1.0), (3, 10, 3.0), (5, 20, 0.3)])
def test_the_smallest_effect_is_detected_in_80_per_cent(n: int, m: int, spread: float) -> None:
    rng, effect = np.random.default_rng(n), significance.minimum_detectable_effect(n, m, spreads=(spread, 1.0))
    pairs = zip(rng.normal(effect, spread, (1000, n)), rng.normal(0, 1, (1000, m)), strict=True)
    assert 0.72 <= np.mean([significance.welch_p(ours, theirs) <= 0.05 for ours, theirs in pairs]) <= 0.88


def test_two_seeds_against_one_have_a_smallest_effect_too() -> None:
    # At one degree of freedom 80 % of |Z| lie below 1.2816, so the shift is 12.706 * 1.2816 = 16.28 (plus a little).
    assert significance.minimum_detectable_effect(2, 1) == pytest.approx(16.3 * math.sqrt(1.5), rel=0.01)


def test_the_spread_within_groups() -> None:
    assert significance.pooled_spread([1.0, 3.0], [10.0, 12.0], [5.0]) == pytest.approx(math.sqrt(2))
    assert math.isnan(significance.pooled_spread([1.0], [2.0]))


@pytest.mark.parametrize("runs", [3, 5, 10])
def test_the_interval_over_tasks_covers_what_it_says(runs: int) -> None:
    rng = np.random.default_rng(runs)
    middles = np.array([0.2, 0.5, 0.6, 0.9])
    # The interquartile mean of infinitely many runs of the four tasks.
    truth = intervals.interquartile_mean(rng.normal(middles[:, None], 0.1, (4, 200_000)))
    drawn = rng.normal(middles[:, None], 0.1, (300, runs, 4, 1))[..., 0].swapaxes(1, 2)
    covered = [low <= truth <= high for low, high in map(intervals.stratified_interval, drawn)]
    assert np.mean(covered) >= 0.91


def test_several_tasks_together() -> None:
    values = [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]]
    assert intervals.interquartile_mean(values) == 3.5
    low, high = intervals.stratified_interval(values)
    assert 2.0 < low < 3.5 < high < 5.0
    assert intervals.probability_of_improvement(values, values) == 0.5
    assert intervals.probability_of_improvement([[2.0], [2.0]], [[1.0, 2.0], [3.0]]) == (0.75 + 0.0) / 2
