"""What an answer says, in a form that two answers can share: a number, yes or no, a choice, or its own words.

`answer_key` reads one answer, `answer_groups` puts the answers to a question into groups that say the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from query_mutator.reading.clauses import content
from query_mutator.reading.marks import after_mark, marked, options_in
from query_mutator.reading.reply import Kind, asks_verdict, read
from query_mutator.reading.text import clean, words
from query_mutator.reading.values import Value, dates_in, numbers_in
from query_mutator.types import AS_IS, FloatArray, read_part

#: How replies are read: the number that is the answer, or the last one; a letter; yes or no; words.
AnswerKind = Literal["number", "last_number", "choice", "yes_no", "words"]

_READ_AS: dict[str, Kind] = {"number": "number", "choice": "letter", "yes_no": "verdict"}
_DIGITS = 9  # significant, of a number's key
_SAME_WORDS = 0.6  # of the words of two answers
_SAME_MEANING = 0.85  # cosine of two answers
_MOST_KEY_WORDS = 12
_ASKS_NUMBER = re.compile(
    r"\bhow (?:many|much|old|far|long|tall|big|fast|often)\b|\bwhat (?:is|was) the (?:total|sum|number|difference|cost|"
    r"average|product|probability|percentage)\b|\b(?:calculate|compute|evaluate)\b|[\d)]\s*[-+*/×÷]\s*[\d(]",
    re.IGNORECASE,
)


def kind_of(question: str) -> AnswerKind:
    """Return how replies to a question are read, by its wording alone."""
    if options_in(question):
        return "choice"
    if _ASKS_NUMBER.search(question):
        return "number"
    return "yes_no" if asks_verdict(question) else "words"


@lru_cache(maxsize=4096)
def answer_key(text: str, kind: AnswerKind, *, question: str = "") -> str | None:
    """Return what a reply says beyond the question, None if nothing; all of a JSON reply without an answer field."""
    if text.lstrip()[:1] in ("{", "[") and (whole := _json_key(text, question)) is not None:
        return whole
    if kind == "last_number":
        number = next(reversed(numbers_in(text)), None)
        return None if number is None else number_key(number)
    if kind != "words":
        said = read(text, _READ_AS[kind], question)
        if said is None:
            return None
        return number_key(said) if isinstance(said, Value) else str(said).lower()
    said_text = after_mark(text)
    dates = dates_in(said_text)
    if len(dates) == 1 and None not in dates[0].value:
        return "-".join(map(str, dates[0].value))
    new = content(said_text) - content(question) or content(said_text)
    return " ".join(sorted(new)[:_MOST_KEY_WORDS] if new else words(said_text)) or None


def _json_key(text: str, question: str) -> str | None:
    try:
        value = json.loads(text, parse_int=float)  # 3 and 3.0 are one number
    except (ValueError, RecursionError):
        return None
    has_answer = any(span.value is not None for span in marked(clean(text), question))
    return None if has_answer else json.dumps(value, sort_keys=True)


def number_key(number: Value) -> str:
    """Return what numbers share that are the same to nine digits."""
    return f"{number.value + 0:.{_DIGITS}g}"  # + 0: minus zero is zero


def answer_groups(
    question: str, answers: Sequence[str], *, kind: AnswerKind | None = None, rows: FloatArray | None = None
) -> list[int]:
    """Return the group of each answer, numbered in order of appearance; an answer without a key is alone.

    Answers in words are equal if most of their words or, with unit rows [n, dim], their meanings are.
    """
    kind = kind or kind_of(question)
    keys = [answer_key(answer, kind, question=question) for answer in answers]
    groups: list[int] = []
    for at, key in enumerate(keys):
        alike = (
            groups[before]
            for before in range(at)
            if key is not None
            and keys[before] is not None
            and (key == keys[before] or (kind == "words" and _same_words(key, keys[before] or "", rows, at, before)))
        )
        groups.append(next(alike, max(groups, default=-1) + 1))
    return groups


def _same_words(one: str, other: str, rows: FloatArray | None, at: int, before: int) -> bool:
    if one[0] in "{[" or other[0] in "{[":  # values of JSON
        return False
    if rows is not None and float(np.dot(rows[at], rows[before])) >= _SAME_MEANING:
        return True
    words, others = set(one.split()), set(other.split())
    shared = len(words & others)
    return shared > 0 and (shared >= _SAME_WORDS * len(words | others) or shared == min(len(words), len(others)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One reply to a question: its text as far as it is read, the form of the request, and what the server said."""

    text: str
    asked: str = ""  # the wording that was asked; "" is the question
    form: str = AS_IS
    logprob: float | None = None  # mean log probability of the reply's tokens; None where it is not known
    cut: bool | None = None  # ended at the token limit; None where it is not known
    context: str = ""  # what the target read besides the question: system text, examples

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", read_part(self.text))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedAnswer:
    """A graded answer to learn from; answers to the same question are the other attempts at it."""

    question: str
    attempt: Attempt
    right: bool
    target: str = ""  # what the question is about (`data.target_key`): never in two folds; "" is the question
    gold: str | None = None  # read only to tell how answers are compared

    @property
    def group(self) -> str:
        """Return the target, else the question."""
        return self.target or self.question
