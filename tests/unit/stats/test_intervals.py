"""Intervals against values from the textbooks."""

from __future__ import annotations

import math

import pytest

from query_mutator.stats.intervals import mean_interval, wilson_interval


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
