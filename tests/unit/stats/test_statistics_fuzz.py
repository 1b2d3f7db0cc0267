"""Every public statistic with small, empty, equal, extreme and missing values: sense or a clear error."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from query_mutator.stats import intervals, significance
from query_mutator.stats.intervals import WHOLE_LINE

FEW = settings(max_examples=80, deadline=None, derandomize=True)
odd = st.sampled_from([0.0, 0.1, 1.0, -1.0, 0.1 + 0.2, 1e-300, 5e-324, 1e300, -1e305, math.nan, math.inf, -math.inf])
numbers = odd | st.floats(-1e6, 1e6)
lists = st.lists(numbers, max_size=7) | st.builds(lambda value, n: [value] * n, numbers, st.integers(0, 30))
rates = st.lists(st.sampled_from([0.0, 0.25, 1.0]) | st.floats(0, 1), max_size=30)


def finite(*values: list[float]) -> bool:
    return all(np.isfinite(one).all() for one in values)


def is_interval(bounds: tuple[float, float]) -> bool:
    return bounds[0] <= bounds[1]  # False for NaN


@pytest.fixture(autouse=True)
def no_warnings() -> None:
    warnings.simplefilter("error")


@FEW
@given(values=lists)
def test_the_interval_of_a_mean_holds_the_mean(values: list[float]) -> None:
    low, high = intervals.mean_interval(values)
    assert is_interval((low, high))
    if len(values) < 2 or not finite(values):
        assert (low, high) == WHOLE_LINE
    elif np.abs(values).max() < 1e150:
        assert low <= np.mean(values) + 1e-9 * np.abs(values).max()
        assert high >= np.mean(values) - 1e-9 * np.abs(values).max()


@FEW
@given(values=rates)
def test_the_interval_of_a_mean_of_rates_is_within_0_and_1_and_has_a_width(values: list[float]) -> None:
    low, high = intervals.mean_interval(values, bounds=(0.0, 1.0))
    assert 0.0 <= low <= high <= 1.0
    assert low < high or len(set(values)) > 1


@FEW
@given(ours=lists, theirs=lists, noise=st.sampled_from([0.0, 1e-300, 0.01, 1e300]))
def test_welch_knows_what_it_does_not_know(ours: list[float], theirs: list[float], noise: float) -> None:
    found = intervals.welch_interval(ours, theirs, noise=noise)
    p = significance.welch_p(ours, theirs, noise=noise)
    assert is_interval(found)
    assert 0.0 <= p <= 1.0
    few = len(ours) < 2 or len(theirs) < 2 or not finite(ours, theirs)
    if few or (not noise and len(set(ours)) == len(set(theirs)) == 1):
        assert (found, p) == (WHOLE_LINE, 1.0)


@FEW
@given(ours=lists, theirs=lists)
def test_the_permutation_test_is_a_share(ours: list[float], theirs: list[float]) -> None:
    found = significance.permutation_test(ours, theirs)
    if not ours or not theirs or not finite(ours, theirs):
        assert found is None
        return
    assert found is not None
    assert 0 < found.p <= 1
    assert not found.exact or found.smallest <= found.p + 1e-12
    if set(ours) == set(theirs) and len(set(ours)) == 1:
        assert found.p == 1


@FEW
@given(values=st.lists(st.integers(0, 9), min_size=6, max_size=6), offset=st.sampled_from([0.0, 1e6, -1e9]))
def test_the_permutation_test_does_not_depend_on_the_unit(values: list[int], offset: float) -> None:
    ours, theirs = values[:3], values[3:]
    expected = significance.permutation_test(ours, theirs)
    shifted = [[offset + 1e-4 * value for value in side] for side in (ours, theirs)]
    assert significance.permutation_test(*shifted) == expected


def test_large_groups_are_drawn_in_parts() -> None:
    values = np.random.default_rng(0).normal(size=3000)
    found = significance.permutation_test(values[:1500].tolist(), (values[1500:] + 1).tolist())
    assert found is not None
    assert found.p < 1e-3


@FEW
@given(values=st.lists(st.floats(0, 1), max_size=8))
def test_corrected_p_values_are_no_smaller_and_keep_their_order(values: list[float]) -> None:
    corrected = significance.holm(values)
    assert all(p <= found <= 1 for p, found in zip(values, corrected, strict=True))
    assert [corrected[at] for at in np.argsort(values, kind="stable")] == sorted(corrected)


def test_what_is_not_a_p_value_is_an_error() -> None:
    with pytest.raises(ValueError, match="not p values"):
        significance.holm([0.1, math.nan])


@pytest.mark.parametrize("n", [0, 1, 2, 3, 7, 50, 10_000])
@pytest.mark.parametrize("m", [0, 1, 2, 30, 100_000])
def test_more_seeds_detect_less(n: int, m: int) -> None:
    found = significance.minimum_detectable_effect(n, m)
    assert found > 0
    assert math.isfinite(found) == (n > 0 and m > 0 and n + m > 2)
    if math.isfinite(found):
        assert n == 1 or m == 1 or significance.minimum_detectable_effect(n + 1, m + 1) <= found
        assert significance.minimum_detectable_effect(n, m, spreads=(2.0, 2.0)) == pytest.approx(2 * found)
        assert math.isnan(significance.minimum_detectable_effect(n, m, spreads=(0.0, 0.0)))


@FEW
@given(groups=st.lists(lists, max_size=4))
def test_the_spread_within_groups_is_a_number_or_nan(groups: list[list[float]]) -> None:
    with np.errstate(all="ignore"):
        found = significance.pooled_spread(*groups)
    assert math.isnan(found) or found >= 0
    if all(len(set(group)) == 1 and finite(group) for group in groups) and any(len(group) > 1 for group in groups):
        assert found == 0


@FEW
@given(ours=st.lists(lists, max_size=3))
def test_aggregates_over_tasks(ours: list[list[float]]) -> None:
    assert is_interval(intervals.stratified_interval(ours))
    found = intervals.probability_of_improvement(ours, ours)
    assert math.isnan(found) or found == pytest.approx(0.5)
    flat = [value for task in ours for value in task if math.isfinite(value) and abs(value) < 1e150]
    middle = intervals.interquartile_mean(flat)
    assert math.isnan(middle) if not flat else min(flat) - 1e-6 <= middle <= max(flat) + 1e-6


@FEW
@given(n=st.integers(0, 10**9), share=st.floats(0, 1))
def test_a_rate_is_in_its_interval(n: int, share: float) -> None:
    successes = int(n * share)
    low, high = intervals.wilson_interval(successes, n)
    assert 0.0 <= low <= high <= 1.0
    assert n == 0 or low <= successes / n <= high


def test_mistakes_are_errors() -> None:
    with pytest.raises(ValueError, match="is not a rate"):
        intervals.wilson_interval(3, 2)
