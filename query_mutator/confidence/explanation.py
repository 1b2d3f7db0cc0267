"""Why a P(right) is high or low, in words: the change of log odds when a group of columns is that of a usual reply."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from query_mutator.confidence.features import FEATURES
from query_mutator.types import DoubleArray

_LEAST_LOG_ODDS = 0.03

Values = Mapping[str, float]


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
        Reason(text=phrase(values), log_odds=own - other)
        for phrase, other in zip(GROUPS.values(), without, strict=True)
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


def _arithmetic(values: Values) -> str:
    equations, wrong = int(values["equations"]), int(values["wrong_equations"])
    if not equations:
        return "no equation is written out"
    return f"{wrong} of {equations} equations are wrong" if wrong else "the arithmetic adds up"


def _result(values: Values) -> str:
    if not values["numbers"]:
        return "the reply has no number"
    return f"the last number is {'the' if values['answer_is_result'] else 'not the'} result of an equation"


def _copy(values: Values) -> str:
    if values["answer_in_question"]:
        return "the answer is a number of the question"
    return (
        "the answer has only words of the question"
        if values["key_in_question"]
        else "the answer has words that the question does not"
    )


def _given(values: Values) -> str:
    unused = int(values["given_unused"])
    return f"numbers of the question in no equation: {unused}" if unused else "all numbers of the question are used"


def _operands(values: Values) -> str:
    unknown = int(values["unknown_operands"])
    return f"numbers in the equations from nowhere: {unknown}" if unknown else "every number has a source"


def _size(values: Values) -> str:
    if math.isnan(values["answer_size"]):
        return "the reply has no number"
    if values["answer_is_negative"]:
        return "the answer is negative"
    return "the answer is a whole number" if values["answer_is_whole"] else "the answer is not a whole number"


def _ending(values: Values) -> str:
    if values["cut"] == 1 or values["unfinished"]:
        return "the reply is cut off"
    if values["ends_in_question"]:
        return "the reply ends in a question"
    return "the reply ends with a conclusion" if values["concludes"] else "the reply ends without a conclusion"


def _doubt(values: Values) -> str:
    if values["refuses"] or values["not_sure"]:
        return "the reply declines to answer"
    hedges = int(values["hedges"])
    return f"hedges in the reply: {hedges}" if hedges else "the reply does not hedge"


def _repetition(values: Values) -> str:
    return "the reply repeats itself" if values["repeated_phrases"] > 0.2 else "the reply hardly repeats itself"


def _length(values: Values) -> str:
    return f"words in the reply: {round(math.expm1(values['words']))}"


def _closeness(values: Values) -> str:
    asked = values["asked_in_last"]
    return f"the last sentence has {100 * asked:.0f} % of the words that were asked about"


def _question(values: Values) -> str:
    return f"words in the question: {round(math.expm1(values['question_words']))}, numbers: {values['given']:.0f}"


def _form(values: Values) -> str:
    form = values["form"]
    return (
        "the usual form" if not form > 0 and not form < 0 else f"a {'better' if form > 0 else 'worse'} form than most"
    )


def _logprob(values: Values) -> str:
    return "the log probability of the reply" if values["logprob"] <= 0 else "no log probability is known"


#: Columns that change together -> what they say, in words; every column is in one group.
GROUPS: Mapping[tuple[str, ...], Callable[[Values], str]] = {
    ("equations", "wrong_equations", "wrong_share", "last_adds_up", "sums", "differences", "products", "quotients",
     "variables"): _arithmetic,
    ("answer_is_result", "answer_is_last_result", "marked_is_last", "answer_repeats", "numbers"): _result,
    ("answer_in_question", "has_key", "key_words", "key_in_question"): _copy,
    ("given_used", "given_unused", "given_mentioned", "given_reused", "steps_for_given"): _given,
    ("unknown_operands", "constant_operands", "unused_results"): _operands,
    ("answer_is_whole", "answer_is_negative", "answer_is_zero", "answer_size", "answer_to_question", "answer_decimals",
     "fractional_results", "negative_results"): _size,
    ("cut", "unfinished", "ends_in_question", "question_marks", "concludes", "last_words", "chars_after_answer",
     "numbers_in_last", "new_in_last", "first_in_last"): _ending,
    ("hedges", "refuses", "not_sure", "alternatives"): _doubt,
    ("repeated_phrases", "repeated_sentences"): _repetition,
    ("chars", "words", "lines", "sentences", "list_items", "markup"): _length,
    ("asked_in_last", "asked_in_reply", "question_covered", "new_words", "echoes_context", "closeness"): _closeness,
    ("question_words", "question_sentences", "question_condition", "given", "given_in_words", "given_size",
     "given_fractional", "question_shares", "question_compares"): _question,
    ("form",): _form,
    ("logprob",): _logprob,
}  # fmt: skip
