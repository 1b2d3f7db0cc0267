"""The models behind P(right): logistic regressions, which give log odds [n].

n answers, F columns

What separates right from wrong answers to one question carries over to other kinds of questions; what separates easy
from hard questions does not. So where questions have several answers, the regression is drawn towards a conditional
logit within questions (McFadden 1974), which sees the first alone. It has a weight for each column, and one for its
product with the rate of the form: what the length of a reply says depends on who was asked, and how.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np

from query_mutator.confidence.features import FEATURES, FORM
from query_mutator.errors import CheckpointError
from query_mutator.types import BoolArray, DoubleArray, IntArray

#: A regression on all columns, or on those that know an answer by its arm alone.
ScorerName = Literal["linear", "arms"]
Arrays = Mapping[str, np.ndarray]

MOST_NUMBERS = 200_000  # of an array in a file
LARGEST = 1e15  # of a weight or scale
_FORM_AT = FEATURES.index(FORM)
_BY_ARM = [_FORM_AT, FEATURES.index("has_key")]
_PENALTY = 20.0  # of the squares of a regression's weights
_TO_CONDITIONAL = 300.0  # of those of their distance to a conditional logit
_WITHIN_QUESTIONS = 100.0  # of the squares of a conditional logit's weights
_QUESTIONS_FOR_CHOICE = 50  # with right and wrong answers
_ITERATIONS = 50
_MOST_STEP = 2.0
_MOST_LOG_ODDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScorer:
    """A logistic regression on standardized columns; an unknown value counts as the mean."""

    weights: DoubleArray  # [F] of the standardized columns, [2F] with those of their products with the form's rate
    means: DoubleArray  # [F]
    scales: DoubleArray  # [F], above 0
    intercept: float

    @classmethod
    def fit(
        cls,
        columns: DoubleArray,
        right: DoubleArray,
        weights: DoubleArray,
        questions: IntArray | None = None,
        *,
        by_form: bool = False,
    ) -> Self:
        """Fit to answers [n, F] to `questions` [n] that are right (1) or wrong (0) and count `weights` [n].

        Without `questions` each answers its own. `by_form` adds the products with the form's rate.
        """
        unknown = np.isnan(columns)
        counted = np.where(unknown, 0.0, weights[:, None])
        total = np.maximum(counted.sum(axis=0), 1e-12)
        means = (np.nan_to_num(columns) * counted).sum(axis=0) / total
        spread = np.sqrt((np.where(unknown, 0, columns - means) ** 2 * counted).sum(axis=0) / total)
        scales = np.where(spread > 1e-9, spread, 1.0)
        inputs = np.column_stack([_inputs(columns, means, scales, by_form=by_form), np.ones(len(columns))])
        varied = np.abs(inputs).max(axis=0) > 1e-9  # a constant column has no weight
        inputs = inputs[:, varied]
        start, penalty = np.zeros(inputs.shape[1]), np.append(np.full(inputs.shape[1] - 1, _PENALTY), 0.0)
        questions = np.arange(len(right)) if questions is None else questions
        both = _right_and_wrong(right, questions)
        if varied[:-1].any() and len(np.unique(questions[both])) >= _QUESTIONS_FOR_CHOICE:
            start[:-1] = conditional_fit(inputs[both, :-1], right[both], weights[both], questions[both])
            penalty[:-1] = _TO_CONDITIONAL
        found = np.zeros(len(varied))
        found[varied] = logistic_fit(inputs, right, weights, start=start, penalty=penalty)
        return cls(weights=found[:-1], means=means, scales=scales, intercept=float(found[-1]))

    def log_odds(self, columns: DoubleArray) -> DoubleArray:
        """Return the log odds [n] of answers with these columns [n, F]; NaN stands for an unknown value."""
        by_form = len(self.weights) > len(self.means)
        return np.asarray(self.intercept + _inputs(columns, self.means, self.scales, by_form=by_form) @ self.weights)

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Return weights, means, scales and the intercept [1]."""
        intercept = np.array([self.intercept])
        return {"weights": self.weights, "means": self.means, "scales": self.scales, "intercept": intercept}

    @classmethod
    def from_arrays(cls, arrays: Arrays, *, columns: int) -> Self:
        """Return the regression in arrays; CheckpointError for other shapes or numbers."""
        weights, means, scales = (real_array(arrays, name, shape=(None,)) for name in ("weights", "means", "scales"))
        is_whole = len(weights) in (columns, 2 * columns) and len(means) == len(scales) == columns
        if not (is_whole and (scales > 0).all()):
            raise CheckpointError(f"the regression is not of {columns} columns, or has a scale that is not above 0")
        (intercept,) = real_array(arrays, "intercept", shape=(1,)).tolist()
        return cls(weights=weights, means=means, scales=scales, intercept=intercept)


def fit_scorer(
    name: ScorerName, columns: DoubleArray, right: DoubleArray, weights: DoubleArray, questions: IntArray
) -> LinearScorer:
    """Fit by name to answers [n, F] to `questions` [n] that are right (1) or wrong (0) and count `weights` [n]."""
    if name == "arms":
        known = np.full_like(columns, np.nan)
        known[:, _BY_ARM] = columns[:, _BY_ARM]
        return LinearScorer.fit(known, right, weights, questions)
    return LinearScorer.fit(columns, right, weights, questions, by_form=True)


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


def conditional_fit(inputs: DoubleArray, right: DoubleArray, weights: DoubleArray, questions: IntArray) -> DoubleArray:
    """Return the coefficients [F] of a conditional logit: of a question, P(answer) is proportional to exp(score).

    Minimizes -log P(a right answer) of questions that have right and wrong ones. Newton steps take the curvature of all
    answers alone, as if the right ones had fixed shares.
    """
    order = np.argsort(questions, kind="stable")
    inputs, right, weights = inputs[order], right[order], weights[order]
    _, starts, counts = np.unique(questions[order], return_index=True, return_counts=True)
    found = np.zeros(inputs.shape[1])
    for _ in range(_ITERATIONS):
        scores = inputs @ found
        odds = np.exp(scores - np.repeat(np.maximum.reduceat(scores, starts), counts))
        p = odds / np.repeat(np.add.reduceat(odds, starts), counts)
        share = p * right / np.repeat(np.add.reduceat(p * right, starts), counts)  # among the right answers
        centered = inputs - np.repeat(np.add.reduceat(p[:, None] * inputs, starts), counts, axis=0)
        slope = inputs.T @ (weights * (p - share)) + _WITHIN_QUESTIONS * found
        curvature = (centered * (weights * p)[:, None]).T @ centered + _WITHIN_QUESTIONS * np.eye(len(found))
        step = np.linalg.solve(curvature, slope)
        largest = float(np.abs(step).max())
        found = found - step * min(1.0, _MOST_STEP / (largest + 1e-12))
        if largest < 1e-6:
            break
    return found


def _right_and_wrong(right: DoubleArray, questions: IntArray) -> BoolArray:
    """Return the answers [n] to questions that have a right and a wrong one."""
    _, question = np.unique(questions, return_inverse=True)
    rate = np.bincount(question, right) / np.bincount(question)
    return np.asarray((rate > 0) & (rate < 1))[question]


def _inputs(columns: DoubleArray, means: DoubleArray, scales: DoubleArray, *, by_form: bool) -> DoubleArray:
    """Return columns [n, F] in standard deviations, at most 5, beyond which one value would decide alone.

    `by_form` adds their products with that of the form's rate.
    """
    inputs = np.clip(np.where(np.isnan(columns), 0.0, (columns - means) / scales), -5, 5)
    return np.hstack([inputs, inputs * inputs[:, [_FORM_AT]]]) if by_form else np.asarray(inputs)


def real_array(arrays: Arrays, name: str, *, shape: tuple[int | None, ...]) -> DoubleArray:
    """Return an array of finite numbers of that shape, None for any size; CheckpointError for anything else."""
    array = arrays.get(name)
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "fiub" or array.size > MOST_NUMBERS:
        raise CheckpointError(f"the array `{name}` is missing, too large, or does not hold numbers")
    fits = array.ndim == len(shape) and all(n in (None, size) for n, size in zip(shape, array.shape, strict=True))
    if not fits:
        raise CheckpointError(f"the array `{name}` has the shape {array.shape}; expected {shape}")
    if not (np.isfinite(array).all() and (np.abs(array.astype(np.float64)) <= LARGEST).all()):
        raise CheckpointError(f"the array `{name}` has a number that is not finite, or above {LARGEST:g}")
    return array.astype(np.float64)
