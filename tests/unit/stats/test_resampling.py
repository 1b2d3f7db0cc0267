"""Crossed resampling of seeds and clusters: against a direct loop, and what its draws have in common."""

from __future__ import annotations

import numpy as np
import pytest

from query_mutator.stats import intervals
from query_mutator.stats.intervals import Floats, crossed_intervals, mean_intervals

KEYS = ["a", "b", "a", "c", "c", "c", "d"]
S, N, C = 3, len(KEYS), 4


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
