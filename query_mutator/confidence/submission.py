"""Which of several answers to submit: the most frequent one, or by P(right).

    k answers to one question, in groups that say the same (`answer_keys.answer_groups`)

`combined` turns the P(right) of answers read one by one into that of each given the others: answers that agree support
each other, and at most one group is right.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from query_mutator.confidence.answer_keys import AnswerKind, Attempt, answer_groups, answer_key, kind_of
from query_mutator.types import DoubleArray

_NEVER_SURE = 1e-6


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
