"""A confidence model as numpy arrays and JSON: in checkpoints and policy files, which strangers may write."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self, get_args

import numpy as np

from query_mutator.confidence.answer_keys import AnswerKind
from query_mutator.confidence.crossfit import Platt
from query_mutator.confidence.features import FEATURES
from query_mutator.confidence.scorers import load_scorer, real_array
from query_mutator.errors import CheckpointError, TooFewAnswersError
from query_mutator.stats.agreement import auroc, brier_score, expected_calibration_error
from query_mutator.types import MAX_NAME_CHARS, DoubleArray

VERSION = 1
_MOST_JSON_BYTES = 1_000_000
_MOST_FORMS = 1_000
_MOST_LOG_ODDS = 50.0
_MOST_AGREEMENT = 10.0
_LARGEST = 1e15  # of a number


@dataclass(frozen=True, slots=True, kw_only=True)
class FitReport:
    """How good the out-of-fold P(right) was."""

    scorer: str
    answers: int
    targets: int
    base_rate: float  # of right answers
    brier: float
    calibration_error: float
    auroc: float

    @property
    def in_words(self) -> str:
        """Return the report in one line."""
        return (
            f"P(right): learned from {self.answers:,} answers, {self.base_rate:.0%} right; "
            f"AUROC {self.auroc:.2f}, calibration error {self.calibration_error:.3f}, out of fold"
        )

    @property
    def is_ordered(self) -> bool:
        """Return whether right answers are ordered above wrong ones more often than by chance."""
        return self.auroc > 0.5

    def check(self) -> None:
        """Raise TooFewAnswersError for a fit that orders right and wrong answers no better than chance."""
        if not self.is_ordered:
            raise TooFewAnswersError(
                f"P(right) of {self.answers:,} answers orders right and wrong ones no better than chance "
                f"(AUROC {self.auroc:.2f}, out of fold); give more questions"
            )

    @classmethod
    def of(cls, p: DoubleArray, right: DoubleArray, *, scorer: str, targets: int) -> Self:
        """Return the report of probabilities [n] of outcomes [n]."""
        return cls(
            scorer=scorer,
            answers=len(p),
            targets=targets,
            base_rate=float(right.mean()),
            brier=brier_score(p, right),
            calibration_error=expected_calibration_error(p, right),
            auroc=auroc(p, right),
        )


def read_stored(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return the fields of a `ConfidenceModel` that arrays hold; CheckpointError of one line for anything else."""
    about = _about(arrays)
    if about.get("version") != VERSION or about.get("features") != list(FEATURES):
        raise CheckpointError("the model of P(right) is of another version of Query Mutator; fit it again")
    slope, intercept = real_array(arrays, "calibration", size=2).tolist()
    (agreement,) = real_array(arrays, "agreement", size=1).tolist()
    if not (0 < slope <= _MOST_LOG_ODDS and abs(intercept) <= _MOST_LOG_ODDS and 0 <= agreement <= _MOST_AGREEMENT):
        raise CheckpointError("the model of P(right) has a calibration or agreement out of bounds")
    reference, known = (real_array(arrays, name, size=len(FEATURES)) for name in ("reference", "known"))
    kind, encoder = about.get("kind"), about.get("encoder")
    if kind is not None and kind not in get_args(AnswerKind):
        raise CheckpointError(f"the model of P(right) reads answers as {str(kind)[:40]!r}, which is not known")
    if not isinstance(encoder, str) or len(encoder) > MAX_NAME_CHARS:
        raise CheckpointError("the model of P(right) names no encoder that could be checked")
    return {
        "scorer": load_scorer(arrays, columns=len(FEATURES)),
        "calibration": Platt(slope=slope, intercept=intercept),
        "agreement": agreement,
        "reference": np.where(known > 0, reference, math.nan),
        "rates": _rates(about.get("rates")),
        "kind": kind,
        "encoder_source": encoder,
        "report": _report(about.get("report")),
    }


def _about(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    array = arrays.get("about")
    if not isinstance(array, np.ndarray) or array.dtype != np.uint8 or array.ndim != 1 or len(array) > _MOST_JSON_BYTES:
        raise CheckpointError("the array `about` is missing, or is not JSON in bytes")
    try:
        about = json.loads(array.tobytes())
    except (ValueError, RecursionError):
        raise CheckpointError("the array `about` is not JSON") from None
    if not isinstance(about, dict):
        raise CheckpointError("the array `about` is not a JSON object")
    return about


def _rates(found: object) -> dict[str, float]:
    if not isinstance(found, dict) or len(found) > _MOST_FORMS:
        raise CheckpointError("the model of P(right) has no rates of forms")
    for name, rate in found.items():
        if len(name) > MAX_NAME_CHARS or not _is_number(rate) or abs(rate) > _MOST_LOG_ODDS:
            raise CheckpointError("the model of P(right) has a rate of a form that is out of bounds")
    return {name: float(rate) for name, rate in found.items()}


def _report(found: object) -> FitReport:
    names = [field.name for field in fields(FitReport)]
    if not isinstance(found, dict) or sorted(found) != sorted(names):
        raise CheckpointError("the model of P(right) has no report of its fit")
    scorer, *numbers = (found[name] for name in names)
    if not isinstance(scorer, str) or len(scorer) > MAX_NAME_CHARS or not all(map(_is_number, numbers)):
        raise CheckpointError("the model of P(right) has a report of its fit that is not made of numbers")
    return FitReport(**found)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < _LARGEST
