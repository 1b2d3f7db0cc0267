"""Fits the scorers with scikit-learn. Only this file imports it, and only a fit imports this file."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.linear_model import LogisticRegression

from query_mutator.confidence.scorers import BothScorer, Candidate, LinearScorer, Scorer, TreeScorer, standardized
from query_mutator.types import DoubleArray

_TREES = {"max_iter": 250, "learning_rate": 0.03, "max_leaf_nodes": 16, "min_samples_leaf": 40}
#: Trees of a regressor. Its fit is waited for at the end of a run; more bins would double that time.
_VALUES = {"max_iter": 60, "learning_rate": 0.12, "max_leaf_nodes": 16, "min_samples_leaf": 20, "max_bins": 63}
_SHARED = {"l2_regularization": 10.0, "max_features": 0.3, "early_stopping": False}
_INVERSE_PENALTY = 0.05  # of the regression
_CHECKED_ROWS = 50


def fitted_scorer(
    name: Candidate, columns: DoubleArray, right: DoubleArray, weights: DoubleArray, *, seed: int
) -> Scorer:
    """Fit a scorer by name to answers [n, F] that are right (1) or wrong (0) [n] and count `weights` [n]."""
    if name == "linear":
        return _linear(columns, right, weights, seed=seed)
    trees = _trees(columns, right, weights, seed=seed)
    if name == "trees":
        return trees
    return BothScorer(linear=_linear(columns, right, weights, seed=seed), trees=trees)


class TreeRegressor:
    """Boosted trees fitted to targets [n] by least squares."""

    def __init__(self, columns: DoubleArray, targets: DoubleArray, *, seed: int) -> None:
        self._model = HistGradientBoostingRegressor(random_state=seed, **_SHARED, **_VALUES)
        self._model.fit(columns, targets)
        self._checked = columns[:_CHECKED_ROWS]

    def predict(self, columns: DoubleArray) -> DoubleArray:
        """Return the values [n] of rows."""
        return np.asarray(self._model.predict(columns))

    def trees(self) -> TreeScorer:
        """Return the trees as arrays, whose `log_odds` are the values."""
        return _as_arrays(self._model, self._checked, self.predict(self._checked))


def _linear(columns: DoubleArray, right: DoubleArray, weights: DoubleArray, *, seed: int) -> LinearScorer:
    unknown = np.isnan(columns)
    counted = np.where(unknown, 0.0, weights[:, None])
    total = np.maximum(counted.sum(axis=0), 1e-12)
    means = (np.nan_to_num(columns) * counted).sum(axis=0) / total
    spread = np.sqrt((np.where(unknown, 0, columns - means) ** 2 * counted).sum(axis=0) / total)
    scales = np.where(spread > 1e-9, spread, 1.0)
    model = LogisticRegression(C=_INVERSE_PENALTY, max_iter=1000, random_state=seed)
    model.fit(standardized(columns, means, scales), right, sample_weight=weights)
    return LinearScorer(weights=model.coef_[0], means=means, scales=scales, intercept=float(model.intercept_[0]))


def _trees(columns: DoubleArray, right: DoubleArray, weights: DoubleArray, *, seed: int) -> TreeScorer:
    filled = np.where(np.isnan(columns).all(axis=0), 0.0, columns)  # scikit-learn takes no column without a value
    model = HistGradientBoostingClassifier(random_state=seed, **_SHARED, **_TREES)
    # Equal weights are left out: weighted quantiles take ten times as long.
    model.fit(filled, right, sample_weight=weights if np.ptp(weights) else None)
    return _as_arrays(model, filled[:_CHECKED_ROWS], model.decision_function(filled[:_CHECKED_ROWS]))


def _as_arrays(model: Any, columns: DoubleArray, values: DoubleArray) -> TreeScorer:
    """Return the trees of a fitted model, checked with the values [n] that it gives some rows."""
    trees = [predictors[0].nodes for predictors in model._predictors]
    scorer = TreeScorer.of(trees, float(model._baseline_prediction[0, 0]))
    if not np.allclose(scorer.log_odds(columns), values, atol=1e-6):
        raise RuntimeError("this version of scikit-learn stores its trees differently; install another one")
    return scorer
