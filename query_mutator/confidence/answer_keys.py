"""What an answer says, in a form that two answers can share: a number, yes or no, a choice, or its own words.

`answer_key` reads one answer, `answer_groups` puts the answers to a question into groups that say the same.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from query_mutator.rewards.matching import Number, decided, final_number, normalized, numbers_in
from query_mutator.types import AS_IS, FloatArray, read_part

#: How answers are read: the number that is marked as the answer, or the last one; a letter; yes or no; words.
AnswerKind = Literal["number", "last_number", "choice", "yes_no", "words"]

_DIGITS = 9  # significant, of a number's key
_SAME_WORDS = 0.6  # of the words of two answers
_SAME_MEANING = 0.85  # cosine of two answers
_MOST_KEY_WORDS = 12

_WORD = re.compile(r"\w+(?:['’]\w+)?")
_VERDICT = re.compile(r"\b(yes|no|true|false)\b", re.IGNORECASE)
_CHOICE = re.compile(r"(?:\b(?:answer|option|choice)\b\W*(?:is|:)?\W*|[(\[]|^\W*)([A-H])(?=[)\].:,\s]|$)")
_OPTIONS = re.compile(r"(?:^|\s)[(\[]?([A-H])[)\].:]\s", re.MULTILINE)
_ASKS_NUMBER = re.compile(
    r"\bhow (?:many|much|old|far|long|tall|big|fast|often)\b|\bwhat (?:is|was) the (?:total|sum|number|difference|cost|"
    r"average|product|probability|percentage)\b|\b(?:calculate|compute|evaluate)\b|[\d)]\s*[-+*/×÷]\s*[\d(]",
    re.IGNORECASE,
)
_ASKS_VERDICT = re.compile(
    r"(?:^|[.!?]\s+)(?:is|are|was|were|do|does|did|can|could|will|would|has|have|had|should)\b[^.!?]*\?\W*$"
    r"|true or false",
    re.IGNORECASE,
)
_COMMON_WORDS = """
a an the of to in on at for and or is are was were be been has have had do does did it its this that these
those with by from as he she they his her their you your we our i if then than so how many much what which who
whom when where why will would can could should each per not no all there here answer final correct therefore
thus hence also called known name named one sure great let's here's
"""
_COMMON = frozenset(_COMMON_WORDS.split())


def kind_of(question: str) -> AnswerKind:
    """Return how answers to a question are read, by its wording alone."""
    if len(set(_OPTIONS.findall(question))) > 1:
        return "choice"
    if _ASKS_NUMBER.search(question):
        return "number"
    return "yes_no" if _ASKS_VERDICT.search(question.strip()) else "words"


def answer_key(text: str, kind: AnswerKind, *, question: str = "") -> str | None:
    """Return what an answer says, None where it has nothing of the kind; words of the question do not count."""
    if kind in ("number", "last_number"):
        number = next(reversed(numbers_in(text)), None) if kind == "last_number" else final_number(text)
        return None if number is None else number_key(number)
    said = decided(text)
    if kind == "yes_no":
        found = _VERDICT.search(said)
        return {"true": "yes", "false": "no"}.get(found[1].lower(), found[1].lower()) if found else None
    if kind == "choice":
        letters = _CHOICE.findall(said)
        return letters[-1].lower() if letters else None
    words = content_words(said) - content_words(question) or content_words(said)
    return " ".join(sorted(words)[:_MOST_KEY_WORDS]) if words else normalized(said) or None


def number_key(number: Number) -> str:
    """Return what numbers share that are the same to nine digits."""
    return f"{number.value + 0:.{_DIGITS}g}"  # + 0: minus zero is zero


@functools.lru_cache(maxsize=4096)
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
    target: str = ""  # what the question is about (`data.split.target_key`): never in two folds; "" is the question
    gold: str | None = None  # read only to tell how answers are compared

    @property
    def group(self) -> str:
        """Return the target, else the question."""
        return self.target or self.question
