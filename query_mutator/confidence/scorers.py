"""The models behind P(right): a logistic regression, boosted trees, or both. Each gives log odds [n].

n answers, F columns

What separates right from wrong answers to one question carries over to other kinds of questions; what separates easy
from hard questions does not. So where questions have several answers, the regression is drawn towards a conditional
logit within questions (McFadden 1974), which sees the first alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self

import numpy as np

from query_mutator.confidence.features import FEATURES, FORM
from query_mutator.confidence.trees import Arrays, BoostedTrees, Boosting, real_array
from query_mutator.errors import CheckpointError
from query_mutator.types import BoolArray, DoubleArray, IntArray

Candidate = Literal["linear", "both", "trees", "arms"]
#: What cross-validation chooses from, the simplest first; `arms` is a regression on BY_ARM alone.
SCORERS: tuple[Candidate, ...] = ("linear", "both", "trees")
BY_ARM = [FEATURES.index(name) for name in (FORM, "has_key")]

TREES = Boosting(trees=150, learning_rate=0.15, logistic=True)
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

    weights: DoubleArray  # [F], of the standardized columns
    means: DoubleArray  # [F]
    scales: DoubleArray  # [F], above 0
    intercept: float

    @classmethod
    def fit(
        cls, columns: DoubleArray, right: DoubleArray, weights: DoubleArray, questions: IntArray | None = None
    ) -> Self:
        """Fit to answers [n, F] to `questions` [n] that are right (1) or wrong (0) and count `weights` [n].

        Without `questions` each answers its own.
        """
        unknown = np.isnan(columns)
        counted = np.where(unknown, 0.0, weights[:, None])
        total = np.maximum(counted.sum(axis=0), 1e-12)
        means = (np.nan_to_num(columns) * counted).sum(axis=0) / total
        spread = np.sqrt((np.where(unknown, 0, columns - means) ** 2 * counted).sum(axis=0) / total)
        scales = np.where(spread > 1e-9, spread, 1.0)
        inputs = np.column_stack([_standardized(columns, means, scales), np.ones(len(columns))])
        start, penalty = np.zeros(len(means) + 1), np.append(np.full(len(means), _PENALTY), 0.0)
        questions = np.arange(len(right)) if questions is None else questions
        both = _right_and_wrong(right, questions)
        if len(np.unique(questions[both])) >= _QUESTIONS_FOR_CHOICE:
            start[:-1] = conditional_fit(inputs[both, :-1], right[both], weights[both], questions[both])
            penalty[:-1] = _TO_CONDITIONAL
        found = logistic_fit(inputs, right, weights, start=start, penalty=penalty)
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
    def fit(
        cls,
        name: Candidate,
        columns: DoubleArray,
        right: DoubleArray,
        weights: DoubleArray,
        questions: IntArray,
        *,
        seed: int,
    ) -> Self:
        """Fit by name to answers [n, F] to `questions` [n] that are right (1) or wrong (0) and count `weights` [n]."""
        if name == "arms":
            known = np.full_like(columns, np.nan)
            known[:, BY_ARM] = columns[:, BY_ARM]
            return cls(linear=LinearScorer.fit(known, right, weights, questions))
        return cls(
            linear=None if name == "trees" else LinearScorer.fit(columns, right, weights, questions),
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


def _standardized(columns: DoubleArray, means: DoubleArray, scales: DoubleArray) -> DoubleArray:
    """Return columns [n, F] in standard deviations, at most 5, beyond which one value would decide alone."""
    return np.asarray(np.clip(np.where(np.isnan(columns), 0.0, (columns - means) / scales), -5, 5))
