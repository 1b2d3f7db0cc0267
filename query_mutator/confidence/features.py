"""What a reply looks like next to its question, as numbers [F]; none of them reads gold.

`FEATURES` names the columns in their order; NaN stands for what is not known. Columns are of the reply's text, of its
numbers and equations, and of what the caller knows: the form's rate, the mean log probability, the closeness of
question and reply.
"""

from __future__ import annotations

import ast
import functools
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np

from query_mutator.confidence.answer_keys import AnswerKind, Attempt, answer_key
from query_mutator.reading import is_not_sure, is_refusal, read
from query_mutator.reading.clauses import content
from query_mutator.reading.values import numbers_in
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
_SIGNS: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_DASHES = str.maketrans({"÷": "/", "−": "-", "–": "-"})

_SHORT_WORDS = 12
_CHARS_OF_TOKEN = 4

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

FORM, LOGPROB, CLOSENESS = "form", "logprob", "closeness"


@dataclass(frozen=True, slots=True)
class _Given:
    """The numbers of a question, in digits and in words, and its own columns."""

    values: tuple[float, ...]
    words: tuple[float, ...]
    columns: Mapping[str, float]


def _number_features(question: str, text: str) -> dict[str, float]:
    given, equations = _given(question), equations_in(text)
    numbers = _values(text)
    last = numbers[-1] if numbers else math.nan
    results = [equation.result for equation in equations]
    marked = read(text, "number", question)
    return {
        **_equation_columns(equations, given, last),
        "variables": len(_VARIABLE.findall(text)),
        "numbers": len(numbers),
        "answer_in_question": _among(last, given.values),
        "answer_is_result": _among(last, results),
        "answer_is_last_result": _among(last, results[-1:]),
        "marked_is_last": marked is not None and _among(marked.value, [last]),
        **_answer_columns(last, numbers, given),
        **_last_sentence_columns(text, last, given),
        **_use_columns(equations, numbers, given),
        **given.columns,
    }


def _equation_columns(equations: Sequence[Equation], given: _Given, last: float) -> dict[str, float]:
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
    return {
        "equations": len(equations),
        "wrong_equations": wrong,
        "wrong_share": wrong / max(1, len(equations)),
        "last_adds_up": equations[-1].adds_up if equations else math.nan,
        "sums": operators.count("+"),
        "differences": operators.count("-"),
        "products": operators.count("*"),
        "quotients": operators.count("/"),
        "fractional_results": sum(not _is_whole(equation.result) for equation in equations),
        "negative_results": sum(equation.result < 0 for equation in equations),
        "unused_results": unused,
        "unknown_operands": unknown,
        "constant_operands": constant,
    }


def _answer_columns(last: float, numbers: Sequence[float], given: _Given) -> dict[str, float]:
    value = 0.0 if math.isnan(last) else last
    found = {
        "answer_is_whole": _is_whole(value),
        "answer_is_negative": value < 0,
        "answer_is_zero": value == 0,
        "answer_size": _size(value),
        "answer_to_question": _size(value) - _size(max(map(abs, given.values), default=0.0)),
        "answer_decimals": 0 if _is_whole(value) else min(6, len(f"{value:.10g}".partition(".")[2])),
        "answer_repeats": sum(_among(value, [number]) for number in numbers),
    }
    return dict.fromkeys(found, math.nan) if math.isnan(last) else found


def _last_sentence_columns(text: str, last: float, given: _Given) -> dict[str, float]:
    parts = _sentences(text)
    numbers = _values(parts[-1]) if parts else []
    digits = [at for at, letter in enumerate(text[-400:]) if letter.isdigit()]
    return {
        "chars_after_answer": math.log1p(len(text[-400:]) - 1 - digits[-1]) if digits else math.nan,
        "numbers_in_last": len(numbers),
        "new_in_last": sum(not _among(number, given.values) for number in numbers),
        "first_in_last": _among(last, numbers[:1]),
    }


def _use_columns(equations: Sequence[Equation], numbers: Sequence[float], given: _Given) -> dict[str, float]:
    operands = [operand for equation in equations for operand in equation.operands]
    used = [*operands, *(equation.result for equation in equations)]
    asked = set(given.values)
    in_use = sum(_among(value, used) for value in asked)
    steps = sum(len(equation.operators) for equation in equations)
    return {
        "given_used": in_use / max(1, len(asked)),
        "given_unused": len(asked) - in_use,
        "given_mentioned": sum(_among(value, numbers) for value in asked) / max(1, len(asked)),
        "given_reused": sum(_among(operand, given.values) for operand in operands) - len(asked),
        "steps_for_given": steps - (len(given.values) + len(given.words) - 1),
    }


@functools.lru_cache(maxsize=4096)
def _given(question: str) -> _Given:
    values = _values(question)
    words = tuple(_NUMBER_WORDS[word] for word in _WORDS.findall(question.lower()) if word in _NUMBER_WORDS)
    columns: dict[str, float] = {
        "given": len(values),
        "given_in_words": len(words),
        "given_size": _size(max(map(abs, values), default=0.0)),
        "given_fractional": any(not _is_whole(value) for value in values),
        "question_shares": bool(_SHARE.search(question)),
        "question_compares": bool(_COMPARES.search(question)),
    }
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
    found = [_value_of(run, percent=percent) for percent in ((1.0, 0.01) if "%" in run else (1.0,))]
    values = tuple(value for value in found if math.isfinite(value))
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


def _value_of(tokens: Sequence[str], *, percent: float) -> float:
    """Return the value of an expression, NaN where the tokens are none; a percent sign multiplies by `percent`."""

    def value(node: ast.AST) -> float:
        match node:
            case ast.Constant(value=float(number)):
                return number
            case ast.UnaryOp(op=ast.USub(), operand=inner):
                return -value(inner)
            case ast.BinOp(left=left, op=ast.Pow(), right=ast.Constant(value="%")):
                return value(left) * percent
            case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _SIGNS:
                return _SIGNS[type(sign)](value(left), value(right))
        raise ValueError(node)

    # No sign binds a number more closely than the power, for which Python's parser takes the percent sign.
    words = ["** '%'" if token == "%" else repr(float(token)) if _is_number(token) else token for token in tokens]
    try:
        return value(ast.parse(" ".join(words), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, OverflowError):
        return math.nan


def feature_row(question: str, attempt: Attempt, *, kind: AnswerKind) -> DoubleArray:
    """Return the columns [F] of one attempt; the rate of its form and its closeness are not known here."""
    return np.array(list(_features(question, attempt, kind=kind).values()), dtype=np.float64)


def _features(question: str, attempt: Attempt, *, kind: AnswerKind) -> dict[str, float]:
    text, logprob = (
        attempt.text.strip(),
        math.nan if attempt.logprob is None else float(np.clip(attempt.logprob, -50, 0)),
    )
    return {
        **_text_features(question, text, attempt, kind),
        **_number_features(question, text),
        FORM: math.nan,
        LOGPROB: logprob,
        "exp_logprob": math.exp(logprob),
        "sum_logprob": logprob * (1 + len(text) / _CHARS_OF_TOKEN),
        CLOSENESS: math.nan,
    }


def _sentences(text: str) -> list[str]:
    """Return the sentences and lines of a text."""
    return [part for part in _SENTENCE.split(text.strip()) if part.strip()]


def is_unfinished(text: str) -> bool:
    """Return whether a text ends in the middle of a sentence, as a reply that was cut; a short one needs no period."""
    return len(text.split()) > _SHORT_WORDS and not _FINISHED.search(text.rstrip())


def _text_features(question: str, text: str, attempt: Attempt, kind: AnswerKind) -> dict[str, float]:
    parts, words = _sentences(text), [word.lower() for word in _WORD.findall(text)]
    last, phrases = parts[-1] if parts else "", [tuple(words[at : at + 3]) for at in range(len(words) - 2)]
    key = answer_key(text, kind, question=question)
    # How much of the question, or of what it asks, returns, how much is new, and how much of that is context
    asked, known, said = _asked_words(question), content(question), content(text)
    new, context = said - known, attempt.context
    return {
        "chars": math.log1p(len(text)),
        "words": math.log1p(len(words)),
        "lines": math.log1p(text.count("\n")),
        "sentences": math.log1p(len(parts)),
        "last_words": math.log1p(len(_WORD.findall(last))),
        "list_items": len(_LIST_ITEM.findall(text)),
        "markup": len(_MARKUP.findall(text)),
        "cut": math.nan if attempt.cut is None else attempt.cut,
        "unfinished": is_unfinished(text),
        "ends_in_question": text.endswith("?"),
        "question_marks": text.count("?"),
        "concludes": bool(_CONCLUSION.search(last)),
        "hedges": len(_HEDGE.findall(text)),
        "refuses": is_refusal(text),
        "not_sure": is_not_sure(text),
        "alternatives": len(_ALTERNATIVE.findall(last)),
        "repeated_phrases": 1 - len(set(phrases)) / len(phrases) if phrases else 0.0,
        "repeated_sentences": len(parts) - len(set(parts)),
        "asked_in_last": len(asked & content(last)) / max(1, len(asked)),
        "asked_in_reply": len(asked & said) / max(1, len(asked)),
        "question_covered": len(known & said) / max(1, len(known)),
        "new_words": len(new) / max(1, len(said)),
        "echoes_context": len(new & content(context)) / max(1, len(new)) if context else math.nan,
        "has_key": key is not None,
        "key_words": len(key.split()) if key else 0,
        "key_in_question": key is not None and set(key.split()) <= known,
        **_question_features(question),
    }


@functools.lru_cache(maxsize=4096)
def _question_features(question: str) -> Mapping[str, float]:
    sentences = _sentences(question)
    return {
        "question_words": math.log1p(len(_WORD.findall(question))),
        "question_sentences": len(sentences),
        "question_condition": bool(sentences) and bool(re.search(r"\bif\b", sentences[-1].lower())),
    }


@functools.lru_cache(maxsize=4096)
def _asked_words(question: str) -> frozenset[str]:
    """Return the content words of the last sentence with a question mark, else of the last one."""
    parts = _sentences(question)
    asked = [part for part in parts if "?" in part][-1:] or parts[-1:]
    return content(asked[0]) if asked else frozenset()


FEATURES = tuple(_features("", Attempt(text=""), kind="words"))
