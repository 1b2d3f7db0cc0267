"""Intervals, tests, paired comparisons and samples against values from the textbooks, scipy and direct loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest
from sklearn.metrics import brier_score_loss, roc_auc_score

from query_mutator import stats
from query_mutator.stats import Floats

KEYS = ["a", "b", "a", "c", "c", "c", "d"]
S, N, C = 3, len(KEYS), 4


def test_wilson_matches_the_published_example_and_stays_inside() -> None:
    # R. Newcombe (1998), table I: 81 of 263, Wilson without continuity correction.
    assert stats.wilson_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    low, high = stats.wilson_interval(28, 28)
    assert (0.85 < low < 0.9, high) == (True, pytest.approx(1.0))
    assert stats.wilson_interval(0, 0) == (0.0, 1.0)


def test_mean_interval_uses_student_t() -> None:
    low, high = stats.mean_interval([1.0, 2.0, 3.0])
    assert (low, high) == pytest.approx((2 - 4.302653 / math.sqrt(3), 2 + 4.302653 / math.sqrt(3)), abs=1e-5)
    for values in ([1.0], [math.nan, 1.0, 2.0], [math.inf, 1.0, 2.0]):
        assert stats.mean_interval(values) == (-math.inf, math.inf)


def test_an_interval_stays_within_what_is_possible() -> None:
    low, high = stats.mean_interval([0.9, 1.0], bounds=(0.0, 1.0))
    assert 0.0 <= low < 0.9
    assert high == 1.0
    assert stats.mean_interval([0.5], bounds=(0.0, 1.0)) == (0.0, 1.0)
    assert stats.mean_interval([1.0, 0.0], bounds=(-1.0, 1.0)) == (-1.0, 1.0)


def test_equal_values_are_not_certain() -> None:
    # Bonett and Price (2012) add one pair to each of the discordant cells: eight ties become a mean of 0 over ten,
    # with standard deviation sqrt(2 / 9) and 9 degrees of freedom.
    half = 2.262157 * math.sqrt(2 / 9 / 10)
    assert stats.mean_interval([0.0] * 8, bounds=(-1.0, 1.0)) == pytest.approx((-half, half), abs=1e-6)
    low, high = stats.mean_interval([1.0] * 8, bounds=(0.0, 1.0))
    assert (0.6 < low < 0.8, high) == (True, 1.0)
    assert stats.mean_interval([2.0] * 8) == (2.0, 2.0)  # nothing is known about its bounds


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


def test_crossed_intervals_are_those_of_a_direct_loop_whole_or_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats, "DRAWS", 300)
    expected = np.percentile(directly(columns(), 300), (2.5, 97.5), axis=0).T
    whole = stats.crossed_intervals(columns(), KEYS)
    assert whole == pytest.approx(expected)
    monkeypatch.setattr(stats, "_NUMBERS_AT_ONCE", 4 * 99)
    assert np.array_equal(stats.crossed_intervals(columns(), KEYS), whole)
    values = np.full((S, N, 2), np.nan)
    values[:, :, 0] = 1.0
    found = stats.crossed_intervals(values, KEYS)
    assert found[0].tolist() == [1.0, 1.0]
    assert np.isnan(found[1]).all()


def test_equal_seeds_add_no_width_and_unequal_ones_do() -> None:
    rng = np.random.default_rng(3)
    keys, one = [str(key) for key in range(200)], rng.integers(0, 2, size=200).astype(float)
    same = np.tile(one[:, None], (8, 1, 1))
    ((low, high),) = stats.crossed_intervals(same, keys)
    assert (low, high) == pytest.approx(tuple(stats.mean_intervals(one[:, None], keys)[0]), abs=0.01)
    shifts = np.where(rng.random((8, 200, 1)) < np.linspace(0, 1, 8)[:, None, None], 1.0, same)
    ((wide_low, wide_high),) = stats.crossed_intervals(shifts, keys)
    assert wide_high - wide_low > 1.4 * (high - low)


def test_welch_is_scipy_s_where_both_groups_are_large() -> None:
    rng = np.random.default_rng(0)
    ours, theirs = rng.normal(0.0, 1.0, 30).tolist(), rng.normal(0.3, 1.4, 40).tolist()
    expected = scipy.stats.ttest_ind(ours, theirs, equal_var=False)
    found = expected.confidence_interval(0.95)
    assert stats.welch_p(ours, theirs) == pytest.approx(expected.pvalue, abs=3e-3)
    assert stats.welch_interval(ours, theirs) == pytest.approx((found.low, found.high), abs=0.01)
    assert stats.welch_interval([1.0], theirs) == (-math.inf, math.inf)
    assert stats.welch_p([1.0], theirs) == 1.0


def test_two_one_sided_tests_are_scipy_s() -> None:
    rng = np.random.default_rng(1)
    ours, theirs = rng.normal(0.0, 1.0, 40).tolist(), rng.normal(0.1, 1.0, 40).tolist()
    shifted = [[value + side for value in ours] for side in (0.7, -0.7)]
    below = scipy.stats.ttest_ind(shifted[0], theirs, equal_var=False, alternative="greater").pvalue
    above = scipy.stats.ttest_ind(shifted[1], theirs, equal_var=False, alternative="less").pvalue
    assert stats.equivalence_p(ours, theirs, 0.7) == pytest.approx(max(below, above), abs=3e-3)
    assert stats.equivalence_p([1.0, 1.0], [1.0, 1.0], 0.7) == 1.0


@pytest.mark.parametrize(("n", "m"), [(2, 2), (2, 10), (3, 10), (10, 3), (5, 5)])
@pytest.mark.parametrize("spread", [0.3, 1.0, 4.0])
def test_few_false_verdicts_whatever_the_spreads(n: int, m: int, spread: float) -> None:
    rng = np.random.default_rng(n)
    pairs = zip(rng.normal(0, spread, (2000, n)), rng.normal(0, 1, (2000, m)), strict=True)
    false = np.mean([stats.welch_p(ours, theirs) <= 0.05 for ours, theirs in pairs])
    assert false <= 0.06 + 2 * math.sqrt(0.06 * 0.94 / 2000)


def test_holm_and_the_spread_within_groups_by_hand() -> None:
    assert stats.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert stats.holm([0.9, 0.8]) == [1.0, 1.0]
    assert stats.holm([]) == []
    assert stats.pooled_spread([1.0, 3.0], [10.0, 12.0], [5.0]) == pytest.approx(math.sqrt(2))
    assert math.isnan(stats.pooled_spread([1.0], [2.0]))


@pytest.mark.parametrize(("n", "effect"), [(3, 3.47), (5, 2.13), (10, 1.35), (20, 0.92)])
def test_the_smallest_effect_that_can_be_seen_with_80_per_cent_power(n: int, effect: float) -> None:
    assert stats.minimum_detectable_effect(n, n) == pytest.approx(effect, abs=0.005)
    assert stats.minimum_detectable_effect(1, 1) == math.inf
    # At one degree of freedom 80 % of |Z| lie below 1.2816, so the shift is 12.706 * 1.2816 = 16.28 (plus a little).
    assert stats.minimum_detectable_effect(2, 1) == pytest.approx(16.3 * math.sqrt(1.5), rel=0.01)


@pytest.mark.parametrize("gained", [0, 1, 3, 8, 40, 700])
@pytest.mark.parametrize("lost", [0, 1, 5, 40, 41, 500])
def test_mcnemar_is_the_two_sided_binomial_test_of_the_discordant_pairs(gained: int, lost: int) -> None:
    known = binomtest(gained, gained + lost).pvalue if gained + lost else 1.0
    assert stats.mcnemar_p(gained, lost) == pytest.approx(known, rel=1e-9)


def test_counts_and_difference_by_hand_and_the_first_ones_gains_are_the_others_losses() -> None:
    ours, theirs = [1, 1, 1, 0, 0, math.nan, 1], [0, 0, 1, 1, 0, 1, math.nan]
    found = stats.compare_pairs(ours, theirs, list("abcdefg"))
    assert (found.gained, found.lost, found.same_right, found.same_wrong, found.unscored) == (2, 1, 1, 1, 2)
    assert (found.questions, found.difference, found.p) == (5, pytest.approx(0.2), 1.0)
    assert not found.is_clear
    back = stats.compare_pairs(theirs, ours, list("abcdefg"))
    assert (back.gained, back.lost, back.p) == (found.lost, found.gained, found.p)
    assert back.interval == pytest.approx((-found.interval[1], -found.interval[0]))


def test_questions_about_one_target_are_not_independent() -> None:
    ours, theirs = [1.0] * 24 + [0.0] * 8 + [1.0] * 32, [0.0] * 24 + [1.0] * 8 + [1.0] * 32
    apart = stats.compare_pairs(ours, theirs, [str(number) for number in range(64)])
    together = stats.compare_pairs(ours, theirs, [str(number // 8) for number in range(64)])
    assert apart.difference == together.difference == 0.25
    assert (apart.is_clear, together.is_clear) == (True, False)  # 8 targets: three gained, one lost
    assert apart.p == together.p < 0.01


def test_no_common_question_says_nothing_and_lists_of_unequal_length_are_refused() -> None:
    for found in (stats.compare_pairs([], [], []), stats.compare_pairs([math.nan, 1.0], [1.0, math.nan], ["a", "b"])):
        assert (found.questions, found.interval, found.p) == (0, (-1.0, 1.0), 1.0)
        assert math.isnan(found.difference)
    with pytest.raises(ValueError, match="1 outcomes are paired with 2 and 2 targets"):
        stats.compare_pairs([1.0], [1.0, 0.0], ["a", "b"])


def test_few_targets_decide_little() -> None:
    gained, lost = [1.0] * 12 + [0.0] * 8, [0.0] * 19 + [1.0]
    assert stats.compare_pairs(gained, lost, ["a"] * 20).interval == (-1.0, 1.0)
    two = stats.compare_pairs(gained, lost, ["a"] * 10 + ["b"] * 10)
    assert not two.is_clear
    many = stats.compare_pairs(gained, lost, [str(number) for number in range(20)])
    assert many.is_clear


@pytest.mark.parametrize(
    ("lost", "gained", "pairs"),
    [
        (0.05, 0.45, 23),  # powerandsamplesize.com, "McNemar's Z-test, 2-Sided Equality", after Connor (1987), page 209
        (0.15, 0.30, 155),  # clinicaltrials-tools.vercel.app, "McNemar's test sample size", Connor (1987)
    ],
)
def test_the_published_numbers_of_questions_show_the_difference(lost: float, gained: float, pairs: int) -> None:
    least, more = (stats.detectable_difference(n, discordant=gained + lost) for n in (pairs, pairs - 1))
    assert least <= gained - lost < more
    assert {stats.detectable_difference(n, discordant=1 / 3) for n in (0, 1, 3, 8)} == {
        math.inf
    }  # a handful shows nothing


def test_targets_of_unequal_size_by_hand() -> None:
    assert stats.design_effect(["a", "a", "a", "b"], correlation=1.0) == pytest.approx(10 / 4)
    assert stats.design_effect(["a", "b"], correlation=0.5) == 1
    assert stats.design_effect([], correlation=0.5) == 1


def sampler_of(weights: list[float]) -> stats.WeightedSampler:
    sampler = stats.WeightedSampler()
    sampler.update(np.arange(len(weights)), np.array(weights))
    return sampler


def test_of_a_slot_that_is_named_twice_the_last_weight_counts_and_zeros_are_never_found() -> None:
    sampler = sampler_of([1.0, 1.0])
    sampler.update(np.array([0, 0]), np.array([5.0, 2.0]))
    assert sampler.total == 3.0
    assert sampler[np.array([0, 1])].tolist() == [2.0, 1.0]
    assert sampler_of([0.0, 1.0, 0.0]).find(np.array([0.0, 1.0, 1.0 + 1e-12])).tolist() == [1, 1, 1]


@given(st.lists(st.integers(0, 20), min_size=1, max_size=40).filter(any), st.data())
def test_any_updates_give_the_sums_of_a_plain_array(weights: list[int], data: st.DataObject) -> None:
    sampler, plain = sampler_of([float(weight) for weight in weights]), np.array(weights, dtype=float)
    for slot, weight in data.draw(st.lists(st.tuples(st.integers(0, len(weights) - 1), st.integers(1, 9)))):
        sampler.update(np.array([slot]), np.array([float(weight)]))
        plain[slot] = weight
    ends = plain.cumsum()
    points = np.arange(0.0, ends[-1], 0.5)
    assert sampler.total == ends[-1]
    assert sampler.find(points).tolist() == np.searchsorted(ends, points, side="right").tolist()


def test_weights_grow_and_nothing_is_forgotten() -> None:
    sampler = sampler_of([1.0, 2.0])
    sampler.set(5000, 3.0)
    assert (sampler[np.array([0, 1, 5000])].tolist(), sampler.total) == ([1.0, 2.0, 3.0], 6.0)
    assert sampler.find(6.0 * np.array([0.0, 0.2, 0.999])).tolist() == [0, 1, 5000]
    sampler.set(5000, 0.0)
    assert sampler.find(3.0 * np.array([0.999])).tolist() == [1]


def test_scores_are_those_of_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    p = rng.random(500).round(2)  # with ties
    right = (rng.random(500) < p).astype(float)
    assert stats.auroc(p, right) == pytest.approx(roc_auc_score(right, p))
    assert stats.brier_score(p, right) == pytest.approx(brier_score_loss(right, p))


def test_calibration_error_by_hand_and_nothing_without_answers_or_both_outcomes() -> None:
    p, right = np.array([0.1] * 10 + [0.9] * 10), np.array([0.0] * 10 + [1.0] * 5 + [0.0] * 5)
    assert [(point["n"], point["rate"]) for point in stats.reliability(p, right, bins=2)] == [(10, 0.0), (10, 0.5)]
    assert stats.expected_calibration_error(p, right, bins=2) == pytest.approx(0.5 * 0.1 + 0.5 * 0.4)
    none = np.empty(0)
    claims = (
        stats.auroc(np.array([0.5]), np.array([1.0])),
        stats.brier_score(none, none),
        stats.expected_calibration_error(none, none),
    )
    assert all(map(math.isnan, claims))
