"""What a reply looks like next to its question, as numbers [F]; none of them reads gold.

`FEATURES` names the columns in their order; NaN stands for what is not known. Columns are of the reply's text, of its
numbers and equations (`number_features`), and of what the caller knows: the form's rate, the mean log probability, the
closeness of question and reply.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np

from query_mutator.confidence.answer_keys import AnswerKind, Attempt, answer_key, content_words
from query_mutator.rewards.matching import final_number, is_not_sure, is_refusal, numbers_in
from query_mutator.types import READ_CHARS, DoubleArray

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

_SIDE_CHARS = 400  # of each side of a sign
_MOST_TOKENS = 60
_MOST_EQUATIONS = 200
_ROUNDING = 0.005  # relative: results are rounded in writing

_CONTINUED = re.compile(r"(?<!\n)\n\s*=")
_BULLET = re.compile(r"^\s*(?:[-*•]|\d+[.)])\s+")
_EQUALS = re.compile(r"(?<![<>!=])=(?!=)|\bequals\b|\bis equal to\b", re.IGNORECASE)
_END = re.compile(r"[.,](?=\s|$)|[;:?!]|<<|>>")
_OF = re.compile(r"(?<=%)\s+of\s+(?=[$€£]?\d)|(?<=\d/\d)\s+of\s+(?=[$€£]?\d)")
_TIMES = re.compile(r"(?<![^\W\d_])[xX×·](?![^\W\d_])")
_RATE = re.compile(r"/\s*(?=[^\W\d_])|-(?=[^\W\d_])")
_MANY_WORDS = re.compile(r"(?:[^\W\d_]+[^\w()+*/÷−%$€£.-]+){3}[^\W\d_]+")  # no unit: the expression ends here
_TOKEN = re.compile(r"(?P<number>(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)|(?P<sign>[-+*/()%|])")
_DASHES = str.maketrans({"÷": "/", "−": "-", "–": "-"})

_SHORT_WORDS = 12

_WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)?")
_HEDGE = re.compile(
    r"\b(?:maybe|perhaps|might|may|probably|possibly|i think|i believe|approximately|about|around|roughly|not sure|"
    r"unclear|seems?|assum\w+|likely|estimate\w*|let's say)\b",
    re.IGNORECASE,
)
_CONCLUSION = re.compile(r"\b(?:therefore|thus|hence|so|answer is|in total|finally)\b|####|\\boxed", re.IGNORECASE)
_FINISHED = re.compile(r"[.!?)\]}\"'*`%$€£”’]$|\d$")
_LIST_ITEM = re.compile(r"(?m)^[^\S\n]*(?:\d+[.)]|[-*•])\s")
_MARKUP = re.compile(r"\*\*|\\|```|\$\$|^#", re.MULTILINE)
_ALTERNATIVE = re.compile(r"\bor\b|/|;", re.IGNORECASE)

TEXT_FEATURES = (
    "chars", "words", "lines", "sentences", "last_words", "list_items", "markup",
    "cut", "unfinished", "ends_in_question", "question_marks", "concludes",
    "hedges", "refuses", "not_sure", "alternatives",
    "repeated_phrases", "repeated_sentences",
    "asked_in_last", "asked_in_reply", "question_covered", "new_words", "echoes_context",
    "has_key", "key_words", "key_in_question",
    "question_words", "question_sentences", "question_condition",
)  # fmt: skip
FORM, LOGPROB, CLOSENESS = "form", "logprob", "closeness"
FEATURES = (*TEXT_FEATURES, *NUMBER_FEATURES, FORM, LOGPROB, CLOSENESS)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Equation:
    """Two sides of a sign of equality: the numbers that go in, the result, and whether it adds up."""

    operands: tuple[float, ...]
    operators: str
    result: float
    adds_up: bool


def equations_in(text: str) -> list[Equation]:
    """Return the equations of the last 20,000 characters of a text, at most 200, in their order."""
    found: list[Equation] = []
    for line in _CONTINUED.sub(" =", text[-READ_CHARS:]).splitlines():
        if "=" in line or "equal" in line:
            found += _equations_of(_EQUALS.split(_BULLET.sub("", line)))
        if len(found) >= _MOST_EQUATIONS:
            break
    return found[:_MOST_EQUATIONS]


def _equations_of(parts: Sequence[str]) -> Iterator[Equation]:
    for before, after in pairwise(parts):
        left = _side(_END.split(before[-_SIDE_CHARS:])[-1], ends=True)
        right = _side(_END.split(after[:_SIDE_CHARS])[0], ends=False)
        if left is None or right is None or not left[2] + right[2]:
            continue
        (values, numbers, operators), (results, *_) = (left, right) if left[2] else (right, left)
        adds_up = any(math.isclose(a, b, rel_tol=_ROUNDING) for a in values for b in results)
        if adds_up or left[2]:  # "3 shirts and 2 shoes = 3 x 4" has no result in front
            yield Equation(operands=numbers, operators=operators, result=results[0], adds_up=adds_up)


def _side(text: str, *, ends: bool) -> tuple[tuple[float, ...], tuple[float, ...], str] | None:
    """Return values, numbers and operators of the expression at the end of a text, or at its beginning.

    A percentage may be a share too, hence several values. None for an incomplete expression.
    """
    text = _RATE.sub(" ", _TIMES.sub("*", _OF.sub("*", text.translate(_DASHES))))
    tokens = [match[0].replace(",", "") for match in _TOKEN.finditer(_MANY_WORDS.sub("|", text).replace("()", ""))]
    run = _run(tokens[::-1][:_MOST_TOKENS])[::-1] if ends else _run(tokens[:_MOST_TOKENS])
    if not run or "|" in run:
        return None
    numbers = tuple(float(token) for token in run if _is_number(token))
    operators = "".join(token for token in run if token in "+-*/")
    found = [_Reader(run, percent=percent).read() for percent in ((1.0, 0.01) if "%" in run else (1.0,))]
    values = tuple(value for value in found if value is not None and math.isfinite(value))
    return (values, numbers, operators) if values and numbers else None


def _run(tokens: Sequence[str]) -> list[str]:
    """Return the tokens up to a number next to a number or a break; `|` in it marks an operator without its number."""
    run: list[str] = []
    for token in tokens:
        if token == "|" or (_is_number(token) and run and _is_number(next((t for t in reversed(run) if t != "%"), ""))):
            break
        run.append(token)
    return run


def _is_number(token: str) -> bool:
    return token[-1:].isdigit()


class _Reader:
    """Evaluates tokens: sum := product (("+" | "-") product)*, product := factor (("*" | "/") factor)*."""

    def __init__(self, tokens: Sequence[str], *, percent: float) -> None:
        self._tokens, self._at, self._percent = tokens, 0, percent

    def read(self) -> float | None:
        """Return the value of all tokens, None where they are no expression."""
        try:
            value = self._sum()
        except (ValueError, ZeroDivisionError, OverflowError):
            return None
        return value if self._at == len(self._tokens) else None

    def _next(self, wanted: str) -> str:
        token = self._tokens[self._at] if self._at < len(self._tokens) else ""
        if not token or token not in wanted:
            return ""
        self._at += 1
        return token

    def _sum(self) -> float:
        value = self._product()
        while sign := self._next("+-"):
            value += self._product() if sign == "+" else -self._product()
        return value

    def _product(self) -> float:
        value = self._factor()
        while sign := self._next("*/"):
            value = value * self._factor() if sign == "*" else value / self._factor()
        return value

    def _factor(self) -> float:
        if self._next("-"):
            return -self._factor()
        if self._next("("):
            value = self._sum()
            if not self._next(")"):
                raise ValueError
        else:
            token = self._tokens[self._at] if self._at < len(self._tokens) else ""
            value = float(token)  # ValueError for an operator
            self._at += 1
        return value * self._percent if self._next("%") else value


def feature_row(
    question: str, attempt: Attempt, *, kind: AnswerKind, form: float = math.nan, closeness: float = math.nan
) -> DoubleArray:
    """Return the columns [F] of one attempt; `form` is the log odds of its form, `closeness` a cosine."""
    text = attempt.text.strip()
    values = [*_text_features(question, text, attempt, kind), *number_features(question, text)]
    logprob = math.nan if attempt.logprob is None else float(np.clip(attempt.logprob, -50, 0))
    return np.array([*values, form, logprob, closeness], dtype=np.float64)


def _sentences(text: str) -> list[str]:
    """Return the sentences and lines of a text."""
    return [part for part in _SENTENCE.split(text.strip()) if part.strip()]


def is_unfinished(text: str) -> bool:
    """Return whether a text ends in the middle of a sentence, as a reply that was cut; a short one needs no period."""
    return len(text.split()) > _SHORT_WORDS and not _FINISHED.search(text.rstrip())


def _text_features(question: str, text: str, attempt: Attempt, kind: AnswerKind) -> list[float]:
    parts, words = _sentences(text), [word.lower() for word in _WORD.findall(text)]
    last, phrases = parts[-1] if parts else "", [tuple(words[at : at + 3]) for at in range(len(words) - 2)]
    key = answer_key(text, kind, question=question)
    return [
        math.log1p(len(text)),
        math.log1p(len(words)),
        math.log1p(text.count("\n")),
        math.log1p(len(parts)),
        math.log1p(len(_WORD.findall(last))),
        float(len(_LIST_ITEM.findall(text))),
        float(len(_MARKUP.findall(text))),
        math.nan if attempt.cut is None else float(attempt.cut),
        float(is_unfinished(text)),
        float(text.endswith("?")),
        float(text.count("?")),
        float(bool(_CONCLUSION.search(last))),
        float(len(_HEDGE.findall(text))),
        float(is_refusal(text)),
        float(is_not_sure(text)),
        float(len(_ALTERNATIVE.findall(last))),
        1 - len(set(phrases)) / len(phrases) if phrases else 0.0,
        float(len(parts) - len(set(parts))),
        *_overlaps(question, text, last, attempt.context),
        float(key is not None),
        float(len(key.split()) if key else 0),
        float(key is not None and set(key.split()) <= content_words(question)),
        *_question_features(question),
    ]


def _overlaps(question: str, text: str, last: str, context: str) -> list[float]:
    """Return how much of the question, or of its last sentence, returns, how much is new, and how much is context."""
    asked, known, said = _asked_words(question), content_words(question), content_words(text)
    new = said - known
    return [
        len(asked & content_words(last)) / max(1, len(asked)),
        len(asked & said) / max(1, len(asked)),
        len(known & said) / max(1, len(known)),
        len(new) / max(1, len(said)),
        len(new & content_words(context)) / max(1, len(new)) if context else math.nan,
    ]


@functools.lru_cache(maxsize=4096)
def _question_features(question: str) -> tuple[float, ...]:
    asked = _sentences(question)[-1:]
    words = math.log1p(len(_WORD.findall(question)))
    return words, float(len(_sentences(question))), float(bool(asked) and bool(re.search(r"\bif\b", asked[0].lower())))


@functools.lru_cache(maxsize=4096)
def _asked_words(question: str) -> frozenset[str]:
    """Return the content words of the last sentence with a question mark, else of the last one."""
    parts = _sentences(question)
    asked = [part for part in parts if "?" in part][-1:] or parts[-1:]
    return content_words(asked[0]) if asked else frozenset()
