"""Why a P(right) is high or low, in words: the change of log odds when a group of columns is that of a usual reply."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from query_mutator.confidence.features import FEATURES
from query_mutator.types import DoubleArray

_LEAST_LOG_ODDS = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Something about an answer, in words, and how much it adds to the log odds of being right."""

    text: str
    log_odds: float


def reasons(
    columns: DoubleArray, reference: DoubleArray, log_odds: Callable[[DoubleArray], DoubleArray]
) -> list[Reason]:
    """Return the reasons for the columns [F] of one answer; `log_odds` scores rows [n, F]."""
    rows = np.tile(columns, (len(GROUPS) + 1, 1))
    for row, group in zip(rows[1:], GROUPS, strict=True):
        at = [FEATURES.index(name) for name in group]
        row[at] = reference[at]
    own, *without = log_odds(rows).tolist()
    values = dict(zip(FEATURES, columns.tolist(), strict=True))
    found = [
        Reason(text=text.format_map(values), log_odds=own - other)
        for text, other in zip(GROUPS.values(), without, strict=True)
        if abs(own - other) >= _LEAST_LOG_ODDS
    ]
    return sorted(found, key=lambda reason: -abs(reason.log_odds))


def agreement_reason(alone: DoubleArray, whole: DoubleArray, groups: Sequence[int], index: int) -> list[Reason]:
    """Return what the other answers [k] do to the P(right) of one; nothing where there are none."""
    others = len(groups) - 1
    if not others:
        return []
    same = list(groups).count(groups[index]) - 1
    change = _logit(float(whole[index])) - _logit(float(alone[index]))
    return [Reason(text=f"{same} of {others} other answers {'agrees' if same == 1 else 'agree'}", log_odds=change)]


def _logit(p: float) -> float:
    p = min(max(p, 1e-9), 1 - 1e-9)
    return math.log(p / (1 - p))


#: Columns that change together -> what they are, in words with values of columns; every column is in one group.
GROUPS: Mapping[tuple[str, ...], str] = {
    ("equations", "wrong_equations", "wrong_share", "last_adds_up", "sums", "differences", "products", "quotients",
     "variables"): "{wrong_equations:.0f} of {equations:.0f} equations are wrong",
    ("answer_is_result", "answer_is_last_result", "marked_is_last", "answer_repeats", "numbers"):
        "how the last number follows from the equations",
    ("answer_in_question", "has_key", "key_words", "key_in_question"): "what the answer shares with the question",
    ("given_used", "given_unused", "given_mentioned", "given_reused", "steps_for_given"):
        "numbers of the question in no equation: {given_unused:.0f}",
    ("unknown_operands", "constant_operands", "unused_results"):
        "numbers in the equations from nowhere: {unknown_operands:.0f}",
    ("answer_is_whole", "answer_is_negative", "answer_is_zero", "answer_size", "answer_to_question", "answer_decimals",
     "fractional_results", "negative_results"): "the size of the number",
    ("cut", "unfinished", "ends_in_question", "question_marks", "concludes", "last_words", "chars_after_answer",
     "numbers_in_last", "new_in_last", "first_in_last"): "how the reply ends",
    ("hedges", "refuses", "not_sure", "alternatives"): "hedges in the reply: {hedges:.0f}",
    ("repeated_phrases", "repeated_sentences"): "{repeated_phrases:.0%} of the phrases are repeated",
    ("chars", "words", "lines", "sentences", "list_items", "markup"): "the length of the reply",
    ("asked_in_last", "asked_in_reply", "question_covered", "new_words", "echoes_context", "closeness"):
        "the last sentence has {asked_in_last:.0%} of the words that were asked about",
    ("question_words", "question_sentences", "question_condition", "given", "given_in_words", "given_size",
     "given_fractional", "question_shares", "question_compares"): "the question itself",
    ("form",): "the form of the request",
    ("logprob",): "the log probability of the reply",
}  # fmt: skip
