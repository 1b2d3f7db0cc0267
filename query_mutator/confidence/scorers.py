"""The models behind P(right): a logistic regression, boosted trees, or both. Each gives log odds [n].

n answers, F columns
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self

import numpy as np

from query_mutator.confidence.trees import Arrays, BoostedTrees, Boosting, real_array
from query_mutator.errors import CheckpointError
from query_mutator.types import DoubleArray

#: What cross-validation chooses from, the simplest first.
Candidate = Literal["linear", "both", "trees"]
SCORERS: tuple[Candidate, ...] = ("linear", "both", "trees")

TREES = Boosting(trees=150, learning_rate=0.15, logistic=True)
_PENALTY = 20.0  # of the squares of the regression's weights
_ITERATIONS = 50
_MOST_STEP = 2.0
_MOST_LOG_ODDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScorer:
    """A logistic regression on standardized columns; an unknown value counts as the mean."""

    weights: DoubleArray  # [F], of the standardized columns
    means: DoubleArray  # [F]
    scales: DoubleArray  # [F], above 0
    intercept: float

    @classmethod
    def fit(cls, columns: DoubleArray, right: DoubleArray, weights: DoubleArray) -> Self:
        """Fit to answers [n, F] that are right (1) or wrong (0) [n] and count `weights` [n]."""
        unknown = np.isnan(columns)
        counted = np.where(unknown, 0.0, weights[:, None])
        total = np.maximum(counted.sum(axis=0), 1e-12)
        means = (np.nan_to_num(columns) * counted).sum(axis=0) / total
        spread = np.sqrt((np.where(unknown, 0, columns - means) ** 2 * counted).sum(axis=0) / total)
        scales = np.where(spread > 1e-9, spread, 1.0)
        inputs = np.column_stack([_standardized(columns, means, scales), np.ones(len(columns))])
        penalty = np.append(np.full(len(means), _PENALTY), 0.0)
        found = logistic_fit(inputs, right, weights, start=np.zeros(len(penalty)), penalty=penalty)
        return cls(weights=found[:-1], means=means, scales=scales, intercept=float(found[-1]))

    def predict(self, columns: DoubleArray) -> DoubleArray:
        """Return the log odds [n] of answers with these columns [n, F]."""
        return np.asarray(self.intercept + _standardized(columns, self.means, self.scales) @ self.weights)

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Return weights, means and scales [F] and the intercept [1]."""
        intercept = np.array([self.intercept])
        return {"weights": self.weights, "means": self.means, "scales": self.scales, "intercept": intercept}

    @classmethod
    def from_arrays(cls, arrays: Arrays, *, columns: int) -> Self:
        """Return the regression in arrays; CheckpointError for other shapes or numbers."""
        weights, means, scales = (real_array(arrays, name, shape=(columns,)) for name in ("weights", "means", "scales"))
        if not (scales > 0).all():
            raise CheckpointError("the array `scales` has a number that is not above 0")
        (intercept,) = real_array(arrays, "intercept", shape=(1,)).tolist()
        return cls(weights=weights, means=means, scales=scales, intercept=intercept)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scorer:
    """The log odds of a regression, of trees, or the mean of both, whose errors on other wordings differ."""

    linear: LinearScorer | None = None
    trees: BoostedTrees | None = None

    @classmethod
    def fit(cls, name: Candidate, columns: DoubleArray, right: DoubleArray, weights: DoubleArray, *, seed: int) -> Self:
        """Fit by name to answers [n, F] that are right (1) or wrong (0) [n] and count `weights` [n]."""
        return cls(
            linear=None if name == "trees" else LinearScorer.fit(columns, right, weights),
            trees=None if name == "linear" else BoostedTrees.fit(columns, right, weights, how=TREES, seed=seed),
        )

    @property
    def _parts(self) -> list[LinearScorer | BoostedTrees]:
        return [part for part in (self.linear, self.trees) if part is not None]

    def log_odds(self, columns: DoubleArray) -> DoubleArray:
        """Return the log odds [n] of answers with these columns [n, F]; NaN stands for an unknown value."""
        return np.asarray(sum(part.predict(columns) for part in self._parts) / len(self._parts))

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays of its parts, whose names differ."""
        return {name: array for part in self._parts for name, array in part.to_arrays().items()}

    @classmethod
    def from_arrays(cls, arrays: Arrays, *, columns: int) -> Self:
        """Return the scorer in arrays; CheckpointError of one line for arrays that hold none."""
        linear = LinearScorer.from_arrays(arrays, columns=columns) if "weights" in arrays else None
        has_trees = linear is None or "value" in arrays
        return cls(linear=linear, trees=BoostedTrees.from_arrays(arrays, columns=columns) if has_trees else None)


def logistic_fit(
    inputs: DoubleArray, right: DoubleArray, weights: DoubleArray, *, start: DoubleArray, penalty: DoubleArray
) -> DoubleArray:
    """Return the coefficients [F] of a logistic regression of outcomes [n] on inputs [n, F], by Newton's method.

    Outcomes count `weights` [n]; `penalty` [F] draws the coefficients to `start` [F].
    """
    found = start
    for _ in range(_ITERATIONS):
        p = 1 / (1 + np.exp(-np.clip(inputs @ found, -_MOST_LOG_ODDS, _MOST_LOG_ODDS)))
        slope = inputs.T @ (weights * (p - right)) + penalty * (found - start)
        curvature = (inputs * (weights * p * (1 - p))[:, None]).T @ inputs + np.diag(penalty)
        step = np.linalg.solve(curvature, slope)
        largest = float(np.abs(step).max())
        found = found - step * min(1.0, _MOST_STEP / (largest + 1e-12))
        if largest < 1e-9:
            break
    return found


def _standardized(columns: DoubleArray, means: DoubleArray, scales: DoubleArray) -> DoubleArray:
    """Return columns [n, F] in standard deviations, at most 5, beyond which one value would decide alone."""
    return np.asarray(np.clip(np.where(np.isnan(columns), 0.0, (columns - means) / scales), -5, 5))
