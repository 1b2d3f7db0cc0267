"""A confidence model as numpy arrays and JSON: in checkpoints and policy files, which strangers may write."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from query_mutator.confidence.answer_keys import AnswerKind
from query_mutator.confidence.crossfit import Platt
from query_mutator.confidence.features import FEATURES
from query_mutator.confidence.scorers import Candidate, Scorer, real_array
from query_mutator.errors import CheckpointError, TooFewAnswersError
from query_mutator.files.whole import record_of
from query_mutator.stats.agreement import auroc, brier_score, expected_calibration_error
from query_mutator.types import MAX_NAME_CHARS, DoubleArray

VERSION = 1
_MOST_JSON_BYTES = 1_000_000
_MOST_FORMS = 1_000
_MOST_LOG_ODDS = 50.0
_MOST_AGREEMENT = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FitReport:
    """How good the out-of-fold P(right) was."""

    scorer: Candidate
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
    def of(cls, p: DoubleArray, right: DoubleArray, *, scorer: Candidate, targets: int) -> Self:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What a stored model holds besides numbers; see `ConfidenceModel`."""

    version: int
    features: tuple[str, ...]
    rates: Mapping[str, float]
    kind: AnswerKind | None
    encoder: str
    report: FitReport

    def __post_init__(self) -> None:
        if (self.version, self.features) != (VERSION, FEATURES):
            raise ValueError("it is of another version of Query Mutator; fit it again")
        if any(len(name) > MAX_NAME_CHARS for name in (self.encoder, *self.rates)) or len(self.rates) > _MOST_FORMS:
            raise ValueError("a name of an encoder or a form is too long, or there are too many")
        if any(abs(rate) > _MOST_LOG_ODDS for rate in self.rates.values()):
            raise ValueError("a rate of a form is out of bounds")


def read_stored(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return the fields of a `ConfidenceModel` that arrays hold; CheckpointError of one line for anything else."""
    about = _about(arrays)
    slope, intercept = real_array(arrays, "calibration", size=2).tolist()
    (agreement,) = real_array(arrays, "agreement", size=1).tolist()
    if not (0 < slope <= _MOST_LOG_ODDS and abs(intercept) <= _MOST_LOG_ODDS and 0 <= agreement <= _MOST_AGREEMENT):
        raise CheckpointError("the model of P(right) has a calibration or agreement out of bounds")
    reference, known = (real_array(arrays, name, size=len(FEATURES)) for name in ("reference", "known"))
    return {
        "scorer": Scorer.from_arrays(arrays, columns=len(FEATURES)),
        "calibration": Platt(slope=slope, intercept=intercept),
        "agreement": agreement,
        "reference": np.where(known > 0, reference, math.nan),
        "rates": about.rates,
        "kind": about.kind,
        "encoder_source": about.encoder,
        "report": about.report,
    }


def _about(arrays: Mapping[str, np.ndarray]) -> About:
    array = arrays.get("about")
    if not isinstance(array, np.ndarray) or array.dtype != np.uint8 or array.ndim != 1 or len(array) > _MOST_JSON_BYTES:
        raise CheckpointError("the array `about` is missing, or is not JSON in bytes")
    try:
        return record_of(About, json.loads(array.tobytes()), where="about")
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"the model of P(right) cannot be read: {error}") from None
