"""What a reply says, in a form that two replies can share: a number, yes or no, a choice, or its own words.

`answer_key` reads one reply, `answer_groups` puts the replies to a question into groups that say the same.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

import numpy as np

from query_mutator.reading.marks import after_mark
from query_mutator.reading.options import options_in
from query_mutator.reading.patterns import Patterns
from query_mutator.reading.reply import Kind, asks_verdict, read
from query_mutator.reading.values import Number, dates_in, numbers_in
from query_mutator.types import FloatArray

P = Patterns("keys")

#: How replies are read: the number that is the answer, or the last one; a letter; yes or no; words.
AnswerKind = Literal["number", "last_number", "choice", "yes_no", "words"]

_READ_AS: dict[str, Kind] = {"number": "number", "choice": "letter", "yes_no": "verdict"}
_DIGITS = 9  # significant, of a number's key
_SAME_WORDS = 0.6  # of the words of two answers
_SAME_MEANING = 0.85  # cosine of two answers
_MOST_KEY_WORDS = 12
_WORD = re.compile(r"\w+(?:['’]\w+)?")
_PUNCTUATION = re.compile(r"[^\w\s]")
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_COMMON_WORDS = """
a an the of to in on at for and or is are was were be been has have had do does did it its this that these those
with by from as he she they his her their you your we our i if then than so how many much what which who
whom when where why will would can could should each per not no all there here answer final correct therefore
thus hence also called known name named one sure great let's here's
"""
_COMMON = frozenset(_COMMON_WORDS.split())


def kind_of(question: str) -> AnswerKind:
    """Return how replies to a question are read, by its wording alone."""
    if options_in(question):
        return "choice"
    if P.ASKS_NUMBER.search(question):
        return "number"
    return "yes_no" if asks_verdict(question) else "words"


@lru_cache(maxsize=4096)
def answer_key(text: str, kind: AnswerKind, *, question: str = "") -> str | None:
    """Return what a reply says, None where it has nothing of the kind; words of the question do not count."""
    if kind == "last_number":
        number = next(reversed(numbers_in(text)), None)
        return None if number is None else number_key(number)
    if kind != "words":
        said = read(text, _READ_AS[kind], question)
        if said is None:
            return None
        return number_key(said.value) if isinstance(said.value, Number) else str(said.value).lower()
    said_text = after_mark(text)
    dates = dates_in(said_text)
    if len(dates) == 1 and None not in dates[0].key:
        return "-".join(map(str, dates[0].key))
    words = content_words(said_text) - content_words(question) or content_words(said_text)
    return " ".join(sorted(words)[:_MOST_KEY_WORDS]) if words else normalized(said_text) or None


def number_key(number: Number) -> str:
    """Return what numbers share that are the same to nine digits."""
    return f"{number.value + 0:.{_DIGITS}g}"  # + 0: minus zero is zero


def normalized(text: str) -> str:
    """Return a text in lower case without punctuation and articles; one of these alone stays."""
    lowered = text.lower()
    return " ".join(_ARTICLES.sub(" ", _PUNCTUATION.sub("", lowered)).split()) or " ".join(lowered.split())


@lru_cache(maxsize=4096)
def content_words(text: str) -> frozenset[str]:
    """Return the words of a text that carry meaning, in lower case."""
    return frozenset(word.lower() for word in _WORD.findall(text)) - _COMMON


def answer_groups(
    question: str, answers: Sequence[str], *, kind: AnswerKind | None = None, rows: FloatArray | None = None
) -> list[int]:
    """Return the group of each answer, numbered in the order of the first one; an answer without a key is alone.

    Answers in words are the same where most of their words or, with unit rows [n, dim], their meanings are.
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
    if rows is not None and float(np.dot(rows[at], rows[before])) >= _SAME_MEANING:
        return True
    words, others = set(one.split()), set(other.split())
    shared = len(words & others)
    return shared > 0 and (shared >= _SAME_WORDS * len(words | others) or shared == min(len(words), len(others)))
