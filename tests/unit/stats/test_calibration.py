"""Brier, calibration error, area under the curve: by hand and against scikit-learn."""

from __future__ import annotations

import math

import numpy as np
import pytest
from sklearn.metrics import brier_score_loss, roc_auc_score

from query_mutator.stats.agreement import auroc, brier_score, expected_calibration_error, reliability


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
