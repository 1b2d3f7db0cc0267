"""Weighted draws: weights laid end to end, many leaves at once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from query_mutator.iqn.sum_tree import SumTree


def tree_of(weights: list[float]) -> SumTree:
    tree = SumTree(len(weights))
    tree.set(np.arange(len(weights)), np.array(weights))
    return tree


def test_points_fall_into_weights_laid_end_to_end() -> None:
    tree = tree_of([1.0, 0.0, 2.0, 0.5, 3.0])
    assert tree.total == 6.5
    points = np.array([0.0, 0.99, 1.0, 2.99, 3.0, 3.49, 3.5, 6.49])
    assert tree.find(points).tolist() == [0, 0, 2, 2, 3, 3, 4, 4]


def test_leaves_without_weight_are_never_found() -> None:
    tree = tree_of([0.0, 1.0, 0.0])
    assert tree.find(np.array([0.0, 1.0, 1.0 + 1e-12])).tolist() == [1, 1, 1]


def test_of_a_leaf_that_is_named_twice_the_last_weight_counts() -> None:
    tree = tree_of([1.0, 1.0])
    tree.set(np.array([0, 0]), np.array([5.0, 2.0]))
    assert tree.total == 3.0
    assert tree[np.array([0, 1])].tolist() == [2.0, 1.0]


def test_a_tree_needs_a_leaf() -> None:
    with pytest.raises(ValueError, match="capacity=0"):
        SumTree(0)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=40).filter(any), st.data())
def test_any_updates_give_the_sums_of_a_plain_array(weights: list[int], data: st.DataObject) -> None:
    tree, plain = tree_of([float(weight) for weight in weights]), np.array(weights, dtype=float)
    for leaf, weight in data.draw(st.lists(st.tuples(st.integers(0, len(weights) - 1), st.integers(1, 9)))):
        tree.set(np.array([leaf]), np.array([float(weight)]))
        plain[leaf] = weight
    ends = plain.cumsum()
    points = np.arange(0.0, ends[-1], 0.5)
    assert tree.total == ends[-1]
    assert tree.find(points).tolist() == np.searchsorted(ends, points, side="right").tolist()
