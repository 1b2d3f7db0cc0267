"""The reward part `committed`: an answer is right when it names an accepted answer and no other of its kind.

A list of guesses that holds the right one is wrong, and so is a copy of the question. What counts as a name of the
same kind is known by family, from the tag `family:NAME` of a question; a two-part question (`family:ONE+OTHER`,
accepted answers joined by " | ") is right when both parts are.
"""

from __future__ import annotations

import functools
import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from importlib import resources

from query_mutator.rewards.matching import decided, is_refusal, numbers_in
from query_mutator.rewards.parts import PARTS, Evidence, Unscored

FAMILY = "family:"
PARTS_JOINED_BY = " | "
#: Families whose answers are symbols: upper and lower case count, and a symbol inside a sentence may be a word.
SYMBOLS = ("symbol", "state_code")

_SHOWN = re.compile(
    r"""["'`*(“‘]{1,8}([A-Z][A-Za-z]?)["'`*)”’]+|(?:\b(?:is|are|as|by|symbol|code|letter)|:|=)\s+([A-Z][A-Za-z]?)\b"""
    r"""|^[^\w\n]*([A-Z][A-Za-z]?)[^\w\n]*$|\b(?!A:)([A-Z][A-Za-z]?):|["'`“‘]{1,8}([A-Z]{3})["'`”’]+""",
    re.MULTILINE,
)
_HALF = re.compile(r"\bhal(?:f|ve)\b", re.IGNORECASE)
_LIST_OF_SYMBOLS = re.compile(r"\b[A-Z][A-Za-z]?(?:\s*(?:,|/|\bor\b|\band\b)\s*[A-Z][A-Za-z]?\b)+")


@PARTS.register("committed")
def committed(evidence: Evidence) -> float:
    """Return 1 when the answer names an accepted answer and no other of its kind; Unscored for an unknown family."""
    question = evidence.question
    family = next((tag.removeprefix(FAMILY) for tag in question.tags if tag.startswith(FAMILY)), None)
    if family is None:
        raise Unscored(f"question {question.id} has no tag `{FAMILY}NAME`, by which its answers are known")
    if is_refusal(evidence.answer):
        return 0.0
    families = family.split("+")
    accepted = [text.split(PARTS_JOINED_BY) for text in question.accept]
    return float(
        all(
            commits_to(evidence.answer, [parts[place] for parts in accepted], family=name, question=question.text)
            for place, name in enumerate(families)
        )
    )


def commits_to(answer: str, accept: Sequence[str], *, family: str, question: str) -> bool:
    """Return whether an answer names one of `accept` and nothing else of the family that the question does not name."""
    said = re.sub(re.escape(question.strip()), " ", decided(answer), flags=re.IGNORECASE)  # without a copy of it
    if family in SYMBOLS:
        return _symbols(said) == {accept[0]}
    if _names().get(family) is None:
        raise Unscored(f"no family {family!r}; known: {', '.join(sorted(_names()))}")
    if all(text.isdecimal() for text in accept):
        return _commits_to_number(said, int(accept[0]), question)
    pattern = _pattern(family)
    named = {_plain(match) for match in pattern.findall(_plain(said))}
    golden = {_plain(text) for text in accept}
    asked = {_plain(match) for match in pattern.findall(_plain(question))}
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
    """Return the symbols that an answer shows: quoted, after "is" or a colon, before one, on a line or in a list."""
    shown = {symbol for groups in _SHOWN.findall(said) for symbol in groups if symbol}
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
    """Return what finds the names of a family in a plain text, the longest first, in the singular or plural.

    "The European continent" is Europe; "in Danish" is a language, and "Czech Republic" a country, not a people.
    """
    names = "|".join(re.escape(name) for name in sorted({_plain(name) for name in _names()[family]}, key=len)[::-1])
    before, after = (r"(?<!\bin )", r"(?! republic)") if family == "demonym" else ("", "")
    return re.compile(rf"{before}(?<!\w)({names}){after}(?=(?:e?s|a?n(?= continent))?(?!\w))")


def _plain(text: str) -> str:
    """Return a text in lower case, without accents."""
    bare = "".join(letter for letter in unicodedata.normalize("NFKD", text) if not unicodedata.combining(letter))
    return bare.casefold()
