"""Out-of-fold P(right): the model that scores an answer has seen no answer about the same target.

n answers, F columns
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from query_mutator.confidence.attempts import LoggedAnswer
from query_mutator.confidence.scorers import SCORERS, BothScorer, Candidate, Scorer
from query_mutator.confidence.submission import combined
from query_mutator.confidence.table import TrainingTable, form_rates, training_table, with_forms
from query_mutator.encoder.base import Encoder
from query_mutator.errors import TooFewAnswersError, UsageError
from query_mutator.types import DoubleArray, IntArray

__all__ = ["CrossFit", "Platt", "cross_fit", "cross_fitted", "fit_agreement", "fit_scorer", "log_loss"]

AGREEMENTS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
USUAL_AGREEMENT = 1.0  # where no question has several answers to learn from
_FEWEST = 10  # right answers, and wrong ones
_QUESTIONS_FOR_AGREEMENT = 50
_PRIOR = 2.0  # answers that draw the calibration towards the identity
_FLAT = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Platt:
    """A logistic regression on log odds: P = sigmoid(slope * log odds + intercept)."""

    slope: float = 1.0
    intercept: float = 0.0

    def log_odds(self, log_odds: DoubleArray) -> DoubleArray:
        """Return calibrated log odds."""
        return self.slope * log_odds + self.intercept

    def p(self, log_odds: DoubleArray) -> DoubleArray:
        """Return calibrated probabilities."""
        return np.asarray(1 / (1 + np.exp(-np.clip(self.log_odds(log_odds), -30, 30))))

    @classmethod
    def fit(cls, log_odds: DoubleArray, right: DoubleArray, weights: DoubleArray) -> Platt:
        """Fit by Newton's method, with a weak pull towards slope 1 and intercept 0."""
        inputs = np.stack([np.clip(log_odds, -30, 30), np.ones_like(log_odds)], axis=1)
        found = start = np.array([1.0, 0.0])
        for _ in range(50):
            p = 1 / (1 + np.exp(-np.clip(inputs @ found, -30, 30)))
            slope = inputs.T @ (weights * (p - right)) + _PRIOR * (found - start)
            curvature = (inputs * (weights * p * (1 - p))[:, None]).T @ inputs + _PRIOR * np.eye(2)
            step = np.linalg.solve(curvature, slope)
            found = found - step * min(1.0, 2 / float(np.abs(step).max() + 1e-12))
            if np.abs(step).max() < 1e-9:
                break
        return cls(slope=max(_FLAT, float(found[0])), intercept=float(found[1]))


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldFit:
    """What scores the answers of one fold, fitted to those of the others."""

    scorer: Scorer
    rates: Mapping[str, float]  # of forms
    calibration: Platt


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossFit:
    """The chosen scorer, its out-of-fold probabilities [n], what gave them, and the calibration of all folds."""

    candidate: Candidate
    p: DoubleArray
    folds: tuple[FoldFit, ...]
    calibration: Platt


class OutOfFold(NamedTuple):
    """The log odds [n] of answers, and of each fold its scorer and the rates of forms."""

    raw: DoubleArray
    scorers: Sequence[Scorer]
    rates: list[dict[str, float]]


def cross_fitted(
    rows: Sequence[LoggedAnswer] | TrainingTable,
    *,
    folds: int = 5,
    candidates: Sequence[Candidate] = SCORERS,
    encoder: Encoder | None = None,
    seed: int = 0,
) -> DoubleArray:
    """Return the P(right) [n] of each answer by a model that has seen no answer about its target."""
    table = rows if isinstance(rows, TrainingTable) else training_table(rows, encoder=encoder)
    return cross_fit(table, weights=np.ones(len(table)), candidates=candidates, folds=folds, seed=seed).p


def cross_fit(
    table: TrainingTable, *, weights: DoubleArray, candidates: Sequence[Candidate], folds: int, seed: int
) -> CrossFit:
    """Choose the scorer with the least out-of-fold log loss; UsageError for too few answers."""
    _check(table, weights, folds)
    fold = table.fold_of(folds)
    best: CrossFit | None = None
    least = math.inf

    @functools.cache
    def out_of_fold(name: Candidate) -> OutOfFold:
        if name != "both":
            return _out_of_fold(table, weights, name, fold, seed)
        linear, trees = out_of_fold("linear"), out_of_fold("trees")
        pairs = zip(linear.scorers, trees.scorers, strict=True)
        scorers = [BothScorer(linear=one, trees=other) for one, other in pairs]
        return OutOfFold((linear.raw + trees.raw) / 2, scorers, linear.rates)

    for name in candidates:
        raw, scorers, rates = out_of_fold(name)
        p = np.empty(len(table))
        fits = []
        for part in range(folds):  # the calibration of a fold comes from the others
            rest = fold != part
            calibration = Platt.fit(raw[rest], table.right[rest], weights[rest])
            p[~rest] = calibration.p(raw[~rest])
            fits.append(FoldFit(scorer=scorers[part], rates=rates[part], calibration=calibration))
        if (loss := log_loss(p, table.right, weights)) < least:
            least = loss
            calibration = Platt.fit(raw, table.right, weights)
            best = CrossFit(candidate=name, p=p, folds=tuple(fits), calibration=calibration)
    assert best is not None
    return best


def fit_scorer(name: Candidate, columns: DoubleArray, right: DoubleArray, weights: DoubleArray, *, seed: int) -> Scorer:
    """Fit a scorer by name to answers [n, F] that are right (1) or wrong (0) [n] and count `weights` [n]."""
    from query_mutator.confidence.fitting import fitted_scorer  # scikit-learn takes a second

    return fitted_scorer(name, columns, right, weights, seed=seed)


def fit_agreement(table: TrainingTable, p: DoubleArray, weights: DoubleArray) -> float:
    """Return the weight of answers that agree, by the log loss on questions with several answers.

    It is judged on all answers to a question and on its first two, because that is how many there may be.
    """
    order = np.argsort(table.questions, kind="stable")
    places = np.split(order, np.flatnonzero(np.diff(table.questions[order])) + 1)
    several = [place for place in places if len(place) > 1 and weights[place[0]] > 0]
    if len(several) < _QUESTIONS_FOR_AGREEMENT:
        return USUAL_AGREEMENT
    several += [place[:2] for place in several if len(place) > 2]
    counted = np.concatenate(several)

    def loss(agreement: float) -> float:
        whole = [combined(p[at], table.answer_groups[at].tolist(), agreement=agreement) for at in several]
        return log_loss(np.concatenate(whole), table.right[counted], weights[counted])

    return min(AGREEMENTS, key=loss)


def log_loss(p: DoubleArray, right: DoubleArray, weights: DoubleArray) -> float:
    """Return the mean negative log likelihood of outcomes [n] that count `weights` [n]."""
    likely = np.clip(np.where(right > 0, p, 1 - p), 1e-9, 1)
    return float(-(weights @ np.log(likely)) / weights.sum())


def _out_of_fold(table: TrainingTable, weights: DoubleArray, name: Candidate, fold: IntArray, seed: int) -> OutOfFold:
    raw = np.empty(len(table))
    scorers: list[Scorer] = []
    all_rates = []
    for part in range(int(fold.max()) + 1):
        held_out = fold == part
        kept = np.where(held_out, 0.0, weights)
        learned = kept > 0
        rates = form_rates(table, kept)
        columns = with_forms(table, rates, learned)
        scorer = fit_scorer(name, columns, table.right[learned], kept[learned], seed=seed)
        raw[held_out] = scorer.log_odds(with_forms(table, rates, held_out))
        scorers.append(scorer)
        all_rates.append(rates)
    return OutOfFold(raw, scorers, all_rates)


def _check(table: TrainingTable, weights: DoubleArray, folds: int) -> None:
    if weights.shape != (len(table),) or not np.isfinite(weights).all() or (weights < 0).any():
        raise UsageError(f"{len(table)} answers need as many weights, finite and not negative")
    used = weights > 0
    hits, n = int(table.right[used].sum()), int(used.sum())
    if min(hits, n - hits) < _FEWEST:
        raise TooFewAnswersError(
            f"{hits} right and {n - hits} wrong answers are too few to learn P(right) from; give {_FEWEST} of each"
        )
    if not 2 <= folds <= len(np.unique(table.targets[used])):
        raise TooFewAnswersError(
            f"{folds} folds need as many targets, and at least 2; give questions about more targets"
        )
    for part in range(folds):
        rest = table.right[used & (table.fold_of(folds) != part)]
        if not 0 < rest.sum() < len(rest):
            raise TooFewAnswersError(
                "all right answers, or all wrong ones, are about a few targets; give more questions"
            )
