"""Which of several answers to submit: the most frequent one, or by P(right).

    k answers to one question, in groups that say the same (`answer_keys.answer_groups`)

`combined` turns the P(right) of answers read one by one into that of each given the others: answers that agree support
each other, and at most one group is right.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from query_mutator.confidence.answer_keys import AnswerKind, Attempt, answer_groups, answer_key, kind_of
from query_mutator.types import DoubleArray, IntArray

MOST_ANSWERS = 6  # to a question, in a fixed order
_NEVER_SURE = 1e-6
_EASIER = 4 / 3  # chosen on training questions, of kinds that the fit had not seen and of four public logs


def vote(groups: Sequence[int], weights: Sequence[float] | DoubleArray | None = None) -> int:
    """Return the index of the heaviest answer of the heaviest group, the first of equals; ValueError without any."""
    if not len(groups):
        raise ValueError("there is no answer to choose from")
    weight = np.ones(len(groups)) if weights is None else np.asarray(weights, dtype=np.float64)
    sums = np.bincount(np.asarray(groups), weights=weight)
    members = np.asarray(groups) == groups[int(np.argmax(np.round(sums[np.asarray(groups)], 12)))]
    return int(np.argmax(np.where(members, weight, -np.inf)))


def plain_vote(question: str, attempts: Sequence[Attempt], *, kind: AnswerKind | None = None) -> int:
    """Return which attempt has the most frequent answer, the first of equals; skip attempts without an answer."""
    kind = kind or kind_of(question)
    texts = [attempt.text for attempt in attempts]
    weights = [float(answer_key(text, kind, question=question) is not None) for text in texts]
    return vote(answer_groups(question, texts, kind=kind), weights if any(weights) else None)


def combined(p: DoubleArray, groups: Sequence[int], *, agreement: float = 1.0) -> DoubleArray:
    """Return the P(right) [k] of each answer given all of them, from that of each alone [k].

    A group is wrong if its best answer is and, independently, each other one, with weight `agreement` (0: ignore them).
    At most one group is right.
    """
    wrong = np.log1p(-np.clip(p, _NEVER_SURE, 1 - _NEVER_SURE))  # log P(wrong)
    group = np.asarray(groups)
    members = group[:, None] == group[None]
    best = np.where(members, wrong, 0.0).min(axis=1)
    log_wrong = best + agreement * (np.where(members, wrong, 0.0).sum(axis=1) - best)
    log_odds = np.log(-np.expm1(log_wrong)) - log_wrong
    largest = max(0.0, float(log_odds.max(initial=0.0)))  # taken out, so that no sum overflows
    odds = np.exp(log_odds - largest)
    first = np.array([groups.index(name) == at for at, name in enumerate(groups)], dtype=np.float64)
    return np.asarray(odds / (math.exp(-largest) + (odds * first).sum()))


def submitted(p: DoubleArray, groups: Sequence[int], *, agreement: float = 1.0) -> int:
    """Return which answer to submit: in the group most likely to be right, the one most likely to be right alone."""
    whole = combined(p, groups, agreement=agreement)
    return int(np.lexsort((-np.arange(len(p)), p, np.round(whole, 12)))[-1])


def submissions(p: DoubleArray, groups: Sequence[int], *, agreement: float = 1.0) -> list[tuple[int, float]]:
    """Return which answer would be submitted after each of them, and its P(right) given those so far."""
    found = []
    for count in range(1, len(p) + 1):
        so_far = p[:count], groups[:count]
        chosen = submitted(*so_far, agreement=agreement)
        found.append((chosen, float(combined(*so_far, agreement=agreement)[chosen])))
    return found


def eased(p: DoubleArray | float, earlier: int | IntArray) -> DoubleArray:
    """Return P(right) with its odds times 4/3 for each of the `earlier` answers: asking stops where it is high enough.

    What the first answers do not settle, further ones seldom do: they are better spent on other questions.
    """
    return np.asarray(p / (p + (1 - p) / _EASIER**earlier))


@dataclass(frozen=True, slots=True, kw_only=True)
class Walks:
    """The submission to each of n questions after each of its answers, up to k; the last one is repeated to the end."""

    held: IntArray  # [n, k] the answers that would be submitted, rows of a table
    p: DoubleArray  # [n, k] their P(right)
    eased: DoubleArray  # [n, k] as it is compared with the one to stop at
    last: IntArray  # [n] the place of the last answer, from 0

    @classmethod
    def of(cls, p: DoubleArray, groups: IntArray, places: Sequence[Sequence[int]], *, agreement: float) -> Self:
        """Return the walks through the rows of each question, of a table with P(right) [N]; MOST_ANSWERS at most."""
        kept = [np.asarray(rows[:MOST_ANSWERS]) for rows in places]
        last = np.array([len(rows) - 1 for rows in kept])
        size = len(kept), int(last.max(initial=0)) + 1
        held, of_held = np.empty(size, dtype=np.int64), np.empty(size)
        for at, rows in enumerate(kept):
            chosen, values = zip(*submissions(p[rows], groups[rows].tolist(), agreement=agreement), strict=True)
            steps = np.minimum(np.arange(size[1]), len(rows) - 1)  # the last one is repeated
            held[at], of_held[at] = rows[[*chosen]][steps], np.array(values)[steps]
        return cls(held=held, p=of_held, eased=eased(of_held, np.arange(size[1])), last=last)

    def stops(self, least: float) -> IntArray:
        """Return the place [n] of the first submission whose eased P(right) is at least `least`, or of the last one."""
        is_last = np.arange(self.p.shape[1]) >= self.last[:, None]
        return np.asarray(np.argmax(is_last | (self.eased >= least), axis=1))

    def at(self, stops: IntArray) -> IntArray:
        """Return the answers [n] that are submitted at these places."""
        return self.held[np.arange(len(stops)), stops]

    def least(self, calls: float, weights: DoubleArray) -> float:
        """Return the highest P(right) to stop at with at most `calls` on average; questions count `weights` [n]."""
        values = [-math.inf, *np.unique(self.eased).tolist(), math.inf]
        over = bisect_right(values, calls, key=lambda least: float(np.average(self.stops(least) + 1, weights=weights)))
        return float(values[max(0, over - 1)])
