"""What the numbers of a reply look like next to those of its question: equations, the final number, what is used."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from query_mutator.confidence.arithmetic import Equation, equations_in
from query_mutator.rewards.matching import final_number, numbers_in

__all__ = ["NUMBER_FEATURES", "number_features"]

_CLOSE = 1e-4
_MOST_NUMBERS = 200  # of a text
_FAR = 15.0  # log10 of a number beyond which all are the same
#: Numbers that a calculation brings in without being asked: small ones, parts and units of time.
_CONSTANTS = (0.5, 1.0, 2.0, 3.0, 4.0, 7.0, 10.0, 12.0, 24.0, 30.0, 52.0, 60.0, 100.0, 365.0, 1000.0)
_DIGIT_WORDS = "zero one two three four five six seven eight nine ten eleven twelve"
_NUMBER_WORDS = {
    word: float(value)
    for value, word in enumerate(_DIGIT_WORDS.split())
} | {"twice": 2.0, "double": 2.0, "half": 0.5, "triple": 3.0, "dozen": 12.0, "third": 1 / 3, "quarter": 0.25,
     "week": 7.0, "hundred": 100.0, "thousand": 1000.0}  # fmt: skip
_WORDS = re.compile(r"[a-z]+")
_SENTENCE = re.compile(r"(?<=[.!?])\s+|\n+")
_COMPARES = re.compile(r"\b(?:more|less|fewer) than\b|\btimes as\b|\bolder\b|\byounger\b", re.IGNORECASE)
_SHARE = re.compile(r"\d/\d|%|\bpercent\b|\bhalf\b|\bthird\b|\bquarter\b", re.IGNORECASE)
_VARIABLE = re.compile(r"\b[a-zA-Z]\s*[=+]|\d[a-z]\b")

NUMBER_FEATURES = (
    "equations", "wrong_equations", "wrong_share", "last_adds_up", "sums", "differences", "products", "quotients",
    "fractional_results", "negative_results", "unused_results", "unknown_operands", "constant_operands", "variables",
    "numbers", "answer_in_question", "answer_is_result", "answer_is_last_result", "marked_is_last",
    "answer_is_whole", "answer_is_negative", "answer_is_zero", "answer_size", "answer_to_question", "answer_decimals",
    "answer_repeats", "chars_after_answer", "numbers_in_last", "new_in_last", "first_in_last",
    "given_used", "given_unused", "given_mentioned", "given_reused", "steps_for_given",
    "given", "given_in_words", "given_size", "given_fractional", "question_shares", "question_compares",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Given:
    """The numbers of a question, in digits and in words, and its own columns."""

    values: tuple[float, ...]
    words: tuple[float, ...]
    columns: tuple[float, ...]


def number_features(question: str, text: str) -> list[float]:
    """Return the columns NUMBER_FEATURES of a reply to a question."""
    given, equations = _given(question), equations_in(text)
    numbers = _values(text)
    last = numbers[-1] if numbers else math.nan
    results = [equation.result for equation in equations]
    return [
        *_equation_columns(equations, given, last),
        float(len(_VARIABLE.findall(text))),
        float(len(numbers)),
        float(_among(last, given.values)),
        float(_among(last, results)),
        float(_among(last, results[-1:])),
        float((marked := final_number(text)) is not None and _among(marked.value, [last])),
        *_answer_columns(last, numbers, given),
        *_last_sentence_columns(text, last, given),
        *_use_columns(equations, numbers, given),
        *given.columns,
    ]


def _equation_columns(equations: Sequence[Equation], given: _Given, last: float) -> list[float]:
    wrong = sum(not equation.adds_up for equation in equations)
    operators = "".join(equation.operators for equation in equations)
    known, unknown, constant, unused = [*given.values, *given.words], 0, 0, 0
    for at, equation in enumerate(equations):
        for operand in equation.operands:
            if not _among(operand, known):
                constant += (is_constant := _among(operand, _CONSTANTS))
                unknown += not is_constant
        known.append(equation.result)
        later = chain.from_iterable(other.operands for other in equations[at + 1 :])
        unused += at + 1 < len(equations) and not _among(equation.result, [*later, last])
    return [
        float(len(equations)),
        float(wrong),
        wrong / max(1, len(equations)),
        float(equations[-1].adds_up) if equations else math.nan,
        *(float(operators.count(operator)) for operator in "+-*/"),
        float(sum(not _is_whole(equation.result) for equation in equations)),
        float(sum(equation.result < 0 for equation in equations)),
        float(unused),
        float(unknown),
        float(constant),
    ]


def _answer_columns(last: float, numbers: Sequence[float], given: _Given) -> list[float]:
    if math.isnan(last):
        return [math.nan] * 7
    return [
        float(_is_whole(last)),
        float(last < 0),
        float(last == 0),
        _size(last),
        _size(last) - _size(max(map(abs, given.values), default=0.0)),
        float(0 if _is_whole(last) else min(6, len(f"{last:.10g}".partition(".")[2]))),
        float(sum(_among(last, [number]) for number in numbers)),
    ]


def _last_sentence_columns(text: str, last: float, given: _Given) -> list[float]:
    parts = [part for part in _SENTENCE.split(text) if part.strip()]
    numbers = _values(parts[-1]) if parts else []
    digits = [at for at, letter in enumerate(text[-400:]) if letter.isdigit()]
    return [
        math.log1p(len(text[-400:]) - 1 - digits[-1]) if digits else math.nan,
        float(len(numbers)),
        float(sum(not _among(number, given.values) for number in numbers)),
        float(_among(last, numbers[:1])),
    ]


def _use_columns(equations: Sequence[Equation], numbers: Sequence[float], given: _Given) -> list[float]:
    operands = [operand for equation in equations for operand in equation.operands]
    used = [*operands, *(equation.result for equation in equations)]
    asked = set(given.values)
    in_use = sum(_among(value, used) for value in asked)
    steps = sum(len(equation.operators) for equation in equations)
    return [
        in_use / max(1, len(asked)),
        float(len(asked) - in_use),
        sum(_among(value, numbers) for value in asked) / max(1, len(asked)),
        float(sum(_among(operand, given.values) for operand in operands) - len(asked)),
        float(steps - (len(given.values) + len(given.words) - 1)),
    ]


@functools.lru_cache(maxsize=4096)
def _given(question: str) -> _Given:
    values = _values(question)
    words = tuple(_NUMBER_WORDS[word] for word in _WORDS.findall(question.lower()) if word in _NUMBER_WORDS)
    columns = (
        float(len(values)),
        float(len(words)),
        _size(max(map(abs, values), default=0.0)),
        float(any(not _is_whole(value) for value in values)),
        float(bool(_SHARE.search(question))),
        float(bool(_COMPARES.search(question))),
    )
    return _Given(tuple(values), words, columns)


def _values(text: str) -> list[float]:
    return [number.value for number in numbers_in(text)][-_MOST_NUMBERS:]


def _among(value: float, others: Iterable[float]) -> bool:
    return any(math.isclose(value, other, rel_tol=_CLOSE, abs_tol=1e-9) for other in others)


def _is_whole(value: float) -> bool:
    return abs(value) >= 10**_FAR or value == int(value)


def _size(value: float) -> float:
    return min(_FAR, math.log10(1 + abs(value)))
