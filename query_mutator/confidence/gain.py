"""Predicted gain of asking another arm: P(its answer is right) - P(this one is), given question and reply.

    n questions, K arms (a model in a form), I inputs: the columns of a reply and the words of its question

Another call is wasted if the other arm is wrong as well. So a regression for each arm predicts both probabilities from
what is known before the call; it is fitted to questions with graded answers in all arms. Heavy penalty and linear form
were chosen by cross-validation on training questions of four pairs of models.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from query_mutator.confidence.features import FEATURES
from query_mutator.confidence.scorers import LinearScorer, real_array
from query_mutator.errors import CheckpointError
from query_mutator.reading.clauses import content
from query_mutator.types import DoubleArray, IntArray

MOST_ARMS = 8
_WORDS = 512  # places for the words of a question, which share them
_INPUTS = len(FEATURES) + _WORDS
WEIGHT = 1 / 30  # of a question: as if the penalty of a regression were thirty times as high


def gain_inputs(columns: DoubleArray, questions: Sequence[str]) -> DoubleArray:
    """Return the inputs [n, I] of replies with these columns [n, F] to questions [n]."""
    words = np.zeros((len(questions), _WORDS))
    for row, question in zip(words, questions, strict=True):
        row[[zlib.crc32(word.encode()) % _WORDS for word in content(question) if not word.isdigit()]] = 1
    return np.column_stack([columns, words / np.sqrt(np.maximum(1, words.sum(axis=1)))[:, None]])


@dataclass(frozen=True, slots=True, kw_only=True)
class GainModel:
    """Predicts the gain of asking each arm, given the answer of one; `fit` makes one, `to_arrays` stores it."""

    arms: tuple[str, ...]  # K
    scorers: tuple[tuple[LinearScorer, ...], ...]  # [K, K]: given a reply in the first arm, that the second is right
    prices: DoubleArray  # [K], mean of a call
    # Of the questions that it was fitted to; not stored with it.
    out_of_fold: DoubleArray = field(default_factory=lambda: np.empty(0), repr=False)  # [n, K, K], gains
    fold_models: tuple[Self, ...] = field(default=(), repr=False)

    @classmethod
    def fit(
        cls,
        arms: Sequence[str],
        inputs: DoubleArray,
        right: DoubleArray,
        folds: IntArray,
        *,
        prices: DoubleArray | None = None,
    ) -> Self:
        """Fit to replies in all arms to n questions in `folds` [n]: inputs [n, K, I] and whether they are right [n, K].

        The gains `out_of_fold` are those of models that have not seen the question's fold, `fold_models`.
        """
        found = np.zeros((len(right), len(arms), len(arms)))
        paid = np.ones(len(arms)) if prices is None else prices
        parts: dict[int, Self] = {}
        for fold in np.unique(folds).tolist():
            inside = folds == fold
            parts[fold] = cls(arms=tuple(arms), scorers=_scorers(inputs[~inside], right[~inside]), prices=paid)
            for at, arm in enumerate(arms):
                found[inside, at] = parts[fold].gains(arm, inputs[inside, at])
        return cls(
            arms=tuple(arms),
            scorers=_scorers(inputs, right),
            prices=paid,
            out_of_fold=found,
            fold_models=tuple(parts.values()),
        )

    def gains(self, arm: str, inputs: DoubleArray) -> DoubleArray:
        """Return the gain [n, K] of asking each arm after replies [n, I] in one of them; 0 for that arm itself."""
        place = self.arms.index(arm)
        log_odds = np.stack([scorer.log_odds(inputs) for scorer in self.scorers[place]], axis=1)
        p = 1 / (1 + np.exp(-np.clip(log_odds, -30, 30)))
        return np.asarray(p - p[:, [place]])

    def ordered(self, arms: Sequence[str]) -> Self:
        """Return the model with its arms in the order of a plan, in which it is stored."""
        places = [self.arms.index(arm) for arm in arms]
        scorers = tuple(tuple(self.scorers[this][other] for other in places) for this in places)
        return type(self)(arms=tuple(arms), scorers=scorers, prices=self.prices[places])

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Return the regressions as arrays [K, K, ...]; the arms are stored by whoever stores the model."""
        rows = [[scorer.to_arrays() for scorer in row] for row in self.scorers]
        found = {name: np.array([[one[name] for one in row] for row in rows]) for name in rows[0][0]}
        return {**found, "prices": self.prices}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Any], arms: Sequence[str]) -> Self:
        """Return the model of these arms; CheckpointError for arrays that hold none."""
        count, prices = len(arms), real_array(arrays, "prices", shape=(None,))
        arrays = {name: array for name, array in arrays.items() if name != "prices"}
        fits = all(np.shape(array)[:2] == (count, count) for array in arrays.values())
        if not (fits and 1 < count == len(prices) <= MOST_ARMS and (prices > 0).all()):
            raise CheckpointError(f"the model of gains is not of {count} arms")
        places = range(count)

        def scorer(this: int, other: int) -> LinearScorer:
            return LinearScorer.from_arrays({name: one[this, other] for name, one in arrays.items()}, columns=_INPUTS)

        scorers = tuple(tuple(scorer(one, other) for other in places) for one in places)
        return cls(arms=tuple(arms), scorers=scorers, prices=prices)


def _scorers(inputs: DoubleArray, right: DoubleArray) -> tuple[tuple[LinearScorer, ...], ...]:
    weights, places = np.full(len(right), WEIGHT), range(right.shape[1])
    return tuple(
        tuple(LinearScorer.fit(inputs[:, this], right[:, other], weights) for other in places) for this in places
    )
