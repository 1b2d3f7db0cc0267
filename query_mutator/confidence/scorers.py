"""The models behind P(right), as arrays: a logistic regression, boosted trees, or both. Each gives log odds [n].

    n answers, F columns, T trees, M nodes of all trees

scikit-learn fits them (`fitting`); prediction needs numpy alone. Files of strangers hold these arrays, so `from_arrays`
checks each: no child stands before its parent, so that no walk through a tree runs in circles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, Self

import numpy as np

from query_mutator.errors import CheckpointError
from query_mutator.types import BoolArray, DoubleArray, IntArray

#: What cross-validation chooses from, the simplest first.
Candidate = Literal["linear", "both", "trees"]
SCORERS: tuple[Candidate, ...] = ("linear", "both", "trees")

Arrays = Mapping[str, np.ndarray]

_MOST_NODES = 100_000
_MOST_TREES = 2_000
_MOST_DEPTH = 64
_BLOCK = 16  # rows scored at once
_LARGEST = 1e15  # of a weight or threshold


class Scorer(Protocol):
    """Columns [n, F] to log odds [n]."""

    def log_odds(self, columns: DoubleArray) -> DoubleArray:
        """Return the log odds [n] of answers with these columns; NaN stands for an unknown value."""
        ...

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Return all it holds."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScorer:
    """A logistic regression on standardized columns; an unknown value counts as the mean."""

    weights: DoubleArray  # [F], of the standardized columns
    means: DoubleArray  # [F]
    scales: DoubleArray  # [F], above 0
    intercept: float

    def log_odds(self, columns: DoubleArray) -> DoubleArray:
        """Return the log odds [n] of answers with these columns [n, F]."""
        return np.asarray(self.intercept + standardized(columns, self.means, self.scales) @ self.weights)

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Return weights, means and scales [F] and the intercept [1]."""
        intercept = np.array([self.intercept])
        return {"weights": self.weights, "means": self.means, "scales": self.scales, "intercept": intercept}

    @classmethod
    def from_arrays(cls, arrays: Arrays, *, columns: int) -> Self:
        """Return the regression in arrays; CheckpointError for other shapes or numbers."""
        weights, means, scales = (real_array(arrays, name, size=columns) for name in ("weights", "means", "scales"))
        if not (scales > 0).all():
            raise CheckpointError("the array `scales` has a number that is not above 0")
        (intercept,) = real_array(arrays, "intercept", size=1).tolist()
        return cls(weights=weights, means=means, scales=scales, intercept=intercept)


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeScorer:
    """Boosted trees; a leaf is its own child, a child of another node stands behind it."""

    column: IntArray  # [M]
    threshold: DoubleArray  # [M]: to the left up to it
    unknown_left: BoolArray  # [M]
    left: IntArray  # [M]
    right: IntArray  # [M]
    value: DoubleArray  # [M], of leaves
    roots: IntArray  # [T]
    baseline: float
    depth: int

    def log_odds(self, columns: DoubleArray) -> DoubleArray:
        """Return the log odds [n] of answers with these columns [n, F]."""
        blocks = [self._block(columns[start : start + _BLOCK]) for start in range(0, len(columns), _BLOCK)]
        return np.concatenate(blocks) if blocks else np.empty(0)

    def _block(self, columns: DoubleArray) -> DoubleArray:
        """Return the log odds of a few rows: which way all nodes send each, then the ways from the roots."""
        found = columns.take(self.column, axis=1)  # [n, M]
        goes_left = (found <= self.threshold) | (np.isnan(found) & self.unknown_left)
        at = np.broadcast_to(self.roots, (len(columns), len(self.roots)))
        rows = np.arange(0, goes_left.size, len(self.column))[:, None]
        for _ in range(self.depth):
            at = np.where(goes_left.take(rows + at), self.left.take(at), self.right.take(at))
        return np.asarray(self.baseline + self.value[at].sum(axis=1))

    @classmethod
    def of(cls, trees: list[np.ndarray], baseline: float) -> Self:
        """Return the trees in scikit-learn's records of nodes, one array per tree."""
        sizes = [len(tree) for tree in trees]
        roots = np.cumsum([0, *sizes[:-1]])
        nodes, first = np.concatenate(trees), np.repeat(roots, sizes)
        leaf, own = nodes["is_leaf"].astype(bool), np.arange(len(nodes))
        left = np.where(leaf, own, nodes["left"].astype(np.int64) + first)
        right = np.where(leaf, own, nodes["right"].astype(np.int64) + first)
        return cls(
            column=np.where(leaf, 0, nodes["feature_idx"]).astype(np.int64),
            threshold=np.clip(np.where(leaf, 0.0, nodes["num_threshold"]), -_LARGEST, _LARGEST),
            unknown_left=nodes["missing_go_to_left"].astype(bool),
            left=left,
            right=right,
            value=np.where(leaf, nodes["value"], 0.0),
            roots=roots,
            baseline=baseline,
            depth=_depth(roots, left, right),
        )

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Return the nodes [M], roots [T] and the baseline [1]."""
        small = {name: getattr(self, name).astype(np.int32) for name in ("column", "left", "right", "roots")}
        rest = {name: getattr(self, name) for name in ("threshold", "unknown_left", "value")}
        return {**small, **rest, "baseline": np.array([self.baseline])}

    @classmethod
    def from_arrays(cls, arrays: Arrays, *, columns: int) -> Self:
        """Return the trees in arrays; CheckpointError for what is not a set of trees over so many columns."""
        value = real_array(arrays, "value", most=_MOST_NODES)
        nodes = len(value)
        left, right = (_indices(arrays, name, size=nodes, below=nodes) for name in ("left", "right"))
        own = np.arange(nodes)
        leaf = (left == own) & (right == own)
        if not (leaf | ((left > own) & (right > own))).all():
            raise CheckpointError("a node of the trees has a child in front of it")
        roots = _indices(arrays, "roots", below=nodes, most=_MOST_TREES)
        return cls(
            column=_indices(arrays, "column", size=nodes, below=columns),
            threshold=real_array(arrays, "threshold", size=nodes),
            unknown_left=_indices(arrays, "unknown_left", size=nodes, below=2).astype(bool),
            left=left,
            right=right,
            value=value,
            roots=roots,
            baseline=float(real_array(arrays, "baseline", size=1)[0]),
            depth=_depth(roots, left, right),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BothScorer:
    """The mean log odds of a regression and of trees, whose errors on other wordings differ."""

    linear: Scorer
    trees: Scorer

    def log_odds(self, columns: DoubleArray) -> DoubleArray:
        """Return the log odds [n] of answers with these columns [n, F]."""
        return (self.linear.log_odds(columns) + self.trees.log_odds(columns)) / 2

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays of both, whose names differ."""
        return {**self.linear.to_arrays(), **self.trees.to_arrays()}

    @classmethod
    def from_arrays(cls, arrays: Arrays, *, columns: int) -> Self:
        """Return what arrays hold; CheckpointError as for each."""
        return cls(
            linear=LinearScorer.from_arrays(arrays, columns=columns),
            trees=TreeScorer.from_arrays(arrays, columns=columns),
        )


def standardized(columns: DoubleArray, means: DoubleArray, scales: DoubleArray) -> DoubleArray:
    """Return columns [n, F] in standard deviations, at most 5, beyond which one value would decide alone."""
    return np.asarray(np.clip(np.where(np.isnan(columns), 0.0, (columns - means) / scales), -5, 5))


def load_scorer(arrays: Arrays, *, columns: int) -> Scorer:
    """Return the scorer in arrays; CheckpointError of one line for arrays that hold none."""
    if "weights" not in arrays:
        return TreeScorer.from_arrays(arrays, columns=columns)
    kind = BothScorer if "roots" in arrays else LinearScorer
    return kind.from_arrays(arrays, columns=columns)


def real_array(arrays: Arrays, name: str, *, size: int | None = None, most: int | None = None) -> DoubleArray:
    """Return a vector of finite numbers of that size, or of 1 to `most`; CheckpointError for anything else."""
    array = arrays.get(name)
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "fiub" or array.ndim != 1:
        raise CheckpointError(f"the array `{name}` is missing, or is not a vector of numbers")
    if (size is not None and len(array) != size) or (most is not None and not 1 <= len(array) <= most):
        raise CheckpointError(f"the array `{name}` has {len(array)} numbers; expected {size or f'1 to {most}'}")
    if not (np.isfinite(array).all() and (np.abs(array.astype(np.float64)) <= _LARGEST).all()):
        raise CheckpointError(f"the array `{name}` has a number that is not finite, or above {_LARGEST:g}")
    return array.astype(np.float64)


def _indices(arrays: Arrays, name: str, *, below: int, size: int | None = None, most: int | None = None) -> IntArray:
    found = real_array(arrays, name, size=size, most=most)
    if not ((found >= 0) & (found < below) & (found == np.floor(found))).all():
        raise CheckpointError(f"the array `{name}` has a number that is not one of 0 to {below - 1}")
    return found.astype(np.int64)


def _depth(roots: IntArray, left: IntArray, right: IntArray) -> int:
    """Return the steps from a root to the deepest leaf; CheckpointError beyond 64."""
    level = np.unique(roots)
    for depth in range(_MOST_DEPTH + 1):
        inner = level[left[level] != level]
        if not len(inner):
            return depth
        level = np.unique(np.concatenate([left[inner], right[inner]]))
    raise CheckpointError(f"a tree is deeper than {_MOST_DEPTH}")
