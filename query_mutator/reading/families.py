"""Answers from a known family of names: right is a reply that names an accepted one and no other of its family.

A list of guesses that holds the right one is wrong, and so is a copy of the question. The family is known from the tag
`family:NAME` of a question; a two-part question (`family:ONE+OTHER`, accepted answers joined by " | ") is right when
both parts are.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from importlib import resources

from query_mutator.errors import UsageError
from query_mutator.reading.marks import after_mark
from query_mutator.reading.patterns import Patterns
from query_mutator.reading.text import clean, fold
from query_mutator.reading.values import numbers_in

P = Patterns("families")

FAMILY = "family:"
PARTS_JOINED_BY = " | "
#: Families whose answers are symbols: upper and lower case count, and a symbol inside a sentence may be a word.
SYMBOLS = ("symbol", "state_code")

_HALF = re.compile(r"\bhal(?:f|ve)\b", re.IGNORECASE)
_LIST_OF_SYMBOLS = re.compile(r"\b[A-Z][A-Za-z]?(?:\s*(?:,|/|\bor\b|\band\b)\s*[A-Z][A-Za-z]?\b)+")


def family_of(tags: Sequence[str]) -> str | None:
    """Return the family that the tags of a question name, None without one."""
    return next((tag.removeprefix(FAMILY) for tag in tags if tag.startswith(FAMILY)), None)


def commits_to(reply: str, accept: Sequence[str], *, family: str, question: str) -> bool:
    """Return whether a reply names an accepted answer, in each part of its family, and nothing else of it."""
    accepted = [text.split(PARTS_JOINED_BY) for text in accept]
    return all(
        _names_one(reply, [parts[place] for parts in accepted], family=name, question=question)
        for place, name in enumerate(family.split("+"))
    )


def _names_one(reply: str, accept: Sequence[str], *, family: str, question: str) -> bool:
    said = re.sub(re.escape(question.strip()), " ", after_mark(clean(reply)), flags=re.IGNORECASE)  # without a copy
    if family in SYMBOLS:
        return _symbols(said) == {accept[0]}
    if _names().get(family) is None:
        raise UsageError(f"no family {family!r}; known: {', '.join(sorted(_names()))}")
    if all(text.isdecimal() for text in accept):
        return _commits_to_number(said, int(accept[0]), question)
    pattern = _pattern(family)
    named = set(pattern.findall(fold(said)))
    golden = {fold(text) for text in accept}
    asked = set(pattern.findall(fold(question)))
    return bool(named & golden) and named - asked <= golden


def _commits_to_number(said: str, gold: int, question: str) -> bool:
    """Return whether the numbers that the question does not have are the gold, or a calculation ends at it."""
    given = {number.value for number in numbers_in(_apart(question))} | ({2} if _HALF.search(question) else set())
    said = _apart(said)
    named = [number.value for number in numbers_in(said)]
    new = {value for value in named if value not in given}
    if new == {gold} or (not new and named and set(named) == {gold}):
        return True
    *_, result = said.rpartition("=")
    ends = [number.value for number in numbers_in(result)]
    return "=" in said and ends[:1] == [gold] and set(ends) <= given | {gold}


def _apart(text: str) -> str:
    """Return a text whose operators are no signs and no fractions: 6 - 1 has the numbers 6 and 1."""
    return re.sub(r"(?<=\d)\s*[-−+/÷]\s*(?=\d)", " ; ", text)


def _symbols(said: str) -> set[str]:
    """Return the symbols that a reply shows: quoted, after "is" or a colon, before one, on a line or in a list."""
    shown = {symbol for groups in P.SHOWN.findall(said) for symbol in groups if symbol}
    for symbols in _LIST_OF_SYMBOLS.findall(said):
        shown |= set(re.findall(r"\b[A-Z][A-Za-z]?\b", symbols))
    return shown


@functools.cache
def _names() -> Mapping[str, Sequence[str]]:
    """Return the answers of each family of both authors' questions."""
    folder = resources.files("query_mutator") / "data" / "questions"
    names: dict[str, Sequence[str]] = {}
    for file in ("general_grader.json", "general_2_grader.json"):
        names |= json.loads((folder / file).read_text(encoding="utf8"))
    return names


@functools.cache
def _pattern(family: str) -> re.Pattern[str]:
    """Return what finds the names of a family in a folded text, the longest first, in the singular or plural.

    "The European continent" is Europe; "in Danish" is a language, and "Czech Republic" a country, not a people.
    """
    names = "|".join(re.escape(name) for name in sorted({fold(name) for name in _names()[family]}, key=len)[::-1])
    before, after = (r"(?<!\bin )", r"(?! republic)") if family == "demonym" else ("", "")
    return re.compile(rf"{before}(?<!\w)({names}){after}(?=(?:e?s|a?n(?= continent))?(?!\w))")
