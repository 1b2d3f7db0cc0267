"""The models behind P(right), as arrays: a logistic regression, boosted trees, or both. Each gives log odds [n].

    n answers, F columns, T trees, M nodes of all trees

scikit-learn fits them and is imported then; prediction needs numpy alone. Files of strangers hold these arrays, so
`from_arrays` checks each: no child stands before its parent, so that no walk through a tree runs in circles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

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


_TREES = {"max_iter": 250, "learning_rate": 0.03, "max_leaf_nodes": 16, "min_samples_leaf": 40}
#: Trees of a regressor. Its fit is waited for at the end of a run; more bins would double that time.
_VALUES = {"max_iter": 60, "learning_rate": 0.12, "max_leaf_nodes": 16, "min_samples_leaf": 20, "max_bins": 63}
_SHARED = {"l2_regularization": 10.0, "max_features": 0.3, "early_stopping": False}
_INVERSE_PENALTY = 0.05  # of the regression
_CHECKED_ROWS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScorer:
    """A logistic regression on standardized columns; an unknown value counts as the mean."""

    weights: DoubleArray  # [F], of the standardized columns
    means: DoubleArray  # [F]
    scales: DoubleArray  # [F], above 0
    intercept: float

    @classmethod
    def fit(cls, columns: DoubleArray, right: DoubleArray, weights: DoubleArray, *, seed: int) -> Self:
        """Fit to answers [n, F] that are right (1) or wrong (0) [n] and count `weights` [n]."""
        from sklearn.linear_model import LogisticRegression

        unknown = np.isnan(columns)
        counted = np.where(unknown, 0.0, weights[:, None])
        total = np.maximum(counted.sum(axis=0), 1e-12)
        means = (np.nan_to_num(columns) * counted).sum(axis=0) / total
        spread = np.sqrt((np.where(unknown, 0, columns - means) ** 2 * counted).sum(axis=0) / total)
        scales = np.where(spread > 1e-9, spread, 1.0)
        model = LogisticRegression(C=_INVERSE_PENALTY, max_iter=1000, random_state=seed)
        model.fit(_standardized(columns, means, scales), right, sample_weight=weights)
        return cls(weights=model.coef_[0], means=means, scales=scales, intercept=float(model.intercept_[0]))

    def log_odds(self, columns: DoubleArray) -> DoubleArray:
        """Return the log odds [n] of answers with these columns [n, F]."""
        return np.asarray(self.intercept + _standardized(columns, self.means, self.scales) @ self.weights)

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
    def fit(cls, columns: DoubleArray, right: DoubleArray, weights: DoubleArray, *, seed: int) -> Self:
        """Fit to answers [n, F] that are right (1) or wrong (0) [n] and count `weights` [n]."""
        from sklearn.ensemble import HistGradientBoostingClassifier

        filled = np.where(np.isnan(columns).all(axis=0), 0.0, columns)  # scikit-learn takes no column without a value
        model = HistGradientBoostingClassifier(random_state=seed, **_SHARED, **_TREES)
        # Equal weights are left out: weighted quantiles take ten times as long.
        model.fit(filled, right, sample_weight=weights if np.ptp(weights) else None)
        return cls.of(model, filled[:_CHECKED_ROWS], model.decision_function(filled[:_CHECKED_ROWS]))

    @classmethod
    def of(cls, model: Any, columns: DoubleArray, values: DoubleArray) -> Self:
        """Return the trees of a fitted model of scikit-learn, checked with the values [n] that it gives some rows."""
        trees = [predictors[0].nodes for predictors in model._predictors]  # records of nodes, one array per tree
        sizes = [len(tree) for tree in trees]
        roots = np.cumsum([0, *sizes[:-1]])
        nodes, first = np.concatenate(trees), np.repeat(roots, sizes)
        leaf, own = nodes["is_leaf"].astype(bool), np.arange(len(nodes))
        left = np.where(leaf, own, nodes["left"].astype(np.int64) + first)
        right = np.where(leaf, own, nodes["right"].astype(np.int64) + first)
        scorer = cls(
            column=np.where(leaf, 0, nodes["feature_idx"]).astype(np.int64),
            threshold=np.clip(np.where(leaf, 0.0, nodes["num_threshold"]), -_LARGEST, _LARGEST),
            unknown_left=nodes["missing_go_to_left"].astype(bool),
            left=left,
            right=right,
            value=np.where(leaf, nodes["value"], 0.0),
            roots=roots,
            baseline=float(model._baseline_prediction[0, 0]),
            depth=_depth(roots, left, right),
        )
        if not np.allclose(scorer.log_odds(columns), values, atol=1e-6):
            raise RuntimeError("this version of scikit-learn stores its trees differently; install another one")
        return scorer

    @classmethod
    def mean_of(cls, parts: Sequence[Self]) -> Self:
        """Return trees whose log odds are the mean of several sets; one pass takes less than several."""
        firsts = np.cumsum([0, *(len(part.value) for part in parts[:-1])])

        def joined(name: str) -> np.ndarray:
            return np.concatenate([getattr(part, name) for part in parts])

        def moved(name: str) -> np.ndarray:
            return np.concatenate([getattr(part, name) + first for part, first in zip(parts, firsts, strict=True)])

        return cls(
            **{name: joined(name) for name in ("column", "threshold", "unknown_left")},
            **{name: moved(name) for name in ("left", "right", "roots")},
            value=joined("value") / len(parts),
            baseline=float(np.mean([part.baseline for part in parts])),
            depth=max(part.depth for part in parts),
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
class Scorer:
    """The log odds of a regression, of trees, or the mean of both, whose errors on other wordings differ."""

    linear: LinearScorer | None = None
    trees: TreeScorer | None = None

    @classmethod
    def fit(cls, name: Candidate, columns: DoubleArray, right: DoubleArray, weights: DoubleArray, *, seed: int) -> Self:
        """Fit by name to answers [n, F] that are right (1) or wrong (0) [n] and count `weights` [n]."""
        return cls(
            linear=None if name == "trees" else LinearScorer.fit(columns, right, weights, seed=seed),
            trees=None if name == "linear" else TreeScorer.fit(columns, right, weights, seed=seed),
        )

    @property
    def _parts(self) -> list[LinearScorer | TreeScorer]:
        return [part for part in (self.linear, self.trees) if part is not None]

    def log_odds(self, columns: DoubleArray) -> DoubleArray:
        """Return the log odds [n] of answers with these columns [n, F]; NaN stands for an unknown value."""
        return np.asarray(sum(part.log_odds(columns) for part in self._parts) / len(self._parts))

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays of its parts, whose names differ."""
        return {name: array for part in self._parts for name, array in part.to_arrays().items()}

    @classmethod
    def from_arrays(cls, arrays: Arrays, *, columns: int) -> Self:
        """Return the scorer in arrays; CheckpointError of one line for arrays that hold none."""
        linear = LinearScorer.from_arrays(arrays, columns=columns) if "weights" in arrays else None
        has_trees = linear is None or "roots" in arrays
        return cls(linear=linear, trees=TreeScorer.from_arrays(arrays, columns=columns) if has_trees else None)


class TreeRegressor:
    """Boosted trees fitted to targets [n] by least squares."""

    def __init__(self, columns: DoubleArray, targets: DoubleArray, *, seed: int) -> None:
        from sklearn.ensemble import HistGradientBoostingRegressor

        self._model = HistGradientBoostingRegressor(random_state=seed, **_SHARED, **_VALUES)
        self._model.fit(columns, targets)
        self._checked = columns[:_CHECKED_ROWS]

    def predict(self, columns: DoubleArray) -> DoubleArray:
        """Return the values [n] of rows."""
        return np.asarray(self._model.predict(columns))

    def trees(self) -> TreeScorer:
        """Return the trees as arrays, whose `log_odds` are the values."""
        return TreeScorer.of(self._model, self._checked, self.predict(self._checked))


def _standardized(columns: DoubleArray, means: DoubleArray, scales: DoubleArray) -> DoubleArray:
    """Return columns [n, F] in standard deviations, at most 5, beyond which one value would decide alone."""
    return np.asarray(np.clip(np.where(np.isnan(columns), 0.0, (columns - means) / scales), -5, 5))


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
