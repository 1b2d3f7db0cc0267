"""Weighted sampling: weights laid end to end, batches, growth; scores of probabilities against scikit-learn."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import brier_score_loss, roc_auc_score

from query_mutator.stats.agreement import auroc, brier_score, expected_calibration_error, reliability
from query_mutator.stats.sampling import WeightedSampler


def sampler_of(weights: list[float]) -> WeightedSampler:
    sampler = WeightedSampler()
    sampler.update(np.arange(len(weights)), np.array(weights))
    return sampler


def test_points_fall_into_weights_laid_end_to_end() -> None:
    sampler = sampler_of([1.0, 0.0, 2.0, 0.5, 3.0])
    assert sampler.total == 6.5
    points = np.array([0.0, 0.99, 1.0, 2.99, 3.0, 3.49, 3.5, 6.49])
    assert sampler.find(points).tolist() == [0, 0, 2, 2, 3, 3, 4, 4]


def test_slots_without_weight_are_never_found() -> None:
    sampler = sampler_of([0.0, 1.0, 0.0])
    assert sampler.find(np.array([0.0, 1.0, 1.0 + 1e-12])).tolist() == [1, 1, 1]


def test_of_a_slot_that_is_named_twice_the_last_weight_counts() -> None:
    sampler = sampler_of([1.0, 1.0])
    sampler.update(np.array([0, 0]), np.array([5.0, 2.0]))
    assert sampler.total == 3.0
    assert sampler[np.array([0, 1])].tolist() == [2.0, 1.0]


def test_without_weights_the_total_is_zero() -> None:
    assert WeightedSampler().total == 0.0


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


@settings(max_examples=60, deadline=None)
@given(weights=st.lists(st.floats(0, 1e6), min_size=1, max_size=300), seed=st.integers(0, 2**32 - 1))
def test_a_draw_lands_where_the_cumulated_weights_say(weights: list[float], seed: int) -> None:
    sampler = WeightedSampler()
    for slot, weight in enumerate(weights):
        sampler.set(slot, weight)
    assert sampler.total == pytest.approx(sum(weights))
    if sampler.total == 0:
        return
    points = sampler.total * np.append(np.random.default_rng(seed).random(50), [0.0, 1 - 2**-53])
    for point, slot in zip(points.tolist(), sampler.find(points).tolist(), strict=True):
        assert weights[slot] > 0
        before = sum(weights[:slot])
        slack = 1e-9 * sampler.total
        assert before - slack <= point <= before + weights[slot] + slack


def test_weights_grow_and_nothing_is_forgotten() -> None:
    sampler = sampler_of([1.0, 2.0])
    sampler.set(5000, 3.0)
    assert (sampler[np.array([0, 1, 5000])].tolist(), sampler.total) == ([1.0, 2.0, 3.0], 6.0)
    assert sampler.find(6.0 * np.array([0.0, 0.2, 0.999])).tolist() == [0, 1, 5000]
    sampler.set(5000, 0.0)
    assert sampler.find(3.0 * np.array([0.999])).tolist() == [1]


def test_draws_are_those_of_a_binary_sum_tree() -> None:
    rng = np.random.default_rng(0)
    sampler = sampler_of((rng.random(1000) ** 0.5).tolist())
    points = (np.arange(512) + rng.random(512)) / 512 * sampler.total
    found = sampler.find(points)
    assert found.tolist() == [_descend(sampler, point) for point in points.tolist()]


def _descend(sampler: WeightedSampler, point: float) -> int:
    """Return the leaf that a binary tree of sums over 1024 leaves finds, level by level."""
    weights = np.zeros(1024)
    weights[:1000] = sampler[np.arange(1000)]
    first, size = 0, 1024
    while size > 1:
        size //= 2
        left = _tree_sum(weights[first : first + size])
        if point >= left and _tree_sum(weights[first + size : first + 2 * size]) > 0:
            first, point = first + size, point - left
    return first


def _tree_sum(weights: np.ndarray) -> float:
    while len(weights) > 1:
        weights = weights[0::2] + weights[1::2]
    return float(weights[0])


def test_scores_are_those_of_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    p = rng.random(500).round(2)  # with ties
    right = (rng.random(500) < p).astype(float)
    assert auroc(p, right) == pytest.approx(roc_auc_score(right, p))
    assert brier_score(p, right) == pytest.approx(brier_score_loss(right, p))


def test_calibration_error_by_hand() -> None:
    p, right = np.array([0.1] * 10 + [0.9] * 10), np.array([0.0] * 10 + [1.0] * 5 + [0.0] * 5)
    assert [(point.n, point.rate) for point in reliability(p, right, bins=2)] == [(10, 0.0), (10, 0.5)]
    assert expected_calibration_error(p, right, bins=2) == pytest.approx(0.5 * 0.1 + 0.5 * 0.4)


def test_without_answers_or_without_both_outcomes_nothing_is_claimed() -> None:
    assert math.isnan(auroc(np.array([0.5]), np.array([1.0])))
    assert math.isnan(brier_score(np.empty(0), np.empty(0)))
    assert math.isnan(expected_calibration_error(np.empty(0), np.empty(0)))
