"""What a question says beyond its subject: numbers by value, marks such as "not" and "at least", statements.

`meaning.toml` has the words. Guards compare what a question and its rewrite say.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import cache
from importlib import resources
from typing import Any

#: A number by value; one that has several parts, as a time or an address, as it is written.
Number = Fraction | str

MAX_DIGITS = 40  # of a number that is read by value
CLOSE = 0.75  # similarity of a word and its spelling in a rewrite
MAX_SPELLINGS = 40  # words that are compared so

_WORD = re.compile(r"[^\W\d_]+")
_TABLES: dict[str, Any] = tomllib.loads(
    resources.files("query_mutator.operators").joinpath("meaning.toml").read_text(encoding="utf-8")
)


def words_in(text: str) -> list[str]:
    """Return the words of a text in lower case."""
    return [word.lower() for word in _WORD.findall(text)]


# --- numbers ---------------------------------------------------------------------------------------------------------

_VALUES = {name: Fraction(n) for n, names in enumerate(_TABLES["ones"].split()) for name in names.split("/")}
_VALUES |= {name: Fraction(10 * n) for n, name in enumerate(_TABLES["tens"].split(), 2)}
_VALUES |= {"half": Fraction(1, 2), "quarter": Fraction(1, 4)}
_SCALES: dict[str, int] = _TABLES["scales"]
_NUMBER = re.compile(
    r"(?<!\w)(?<![^\W\d]-)((?:(?<=\s)|(?<=[(=])|\A)[-−](?=\d))?(\d+(?:[.,:]\d+)*(?:e[+-]?\d{1,3}(?!\w))?)([^\W\d_]*)"
    r"|[^\W\d_]+|[^\s-]",
    re.IGNORECASE,
)
#: Digits that are words in chat: "how 2 sort", "4 a friend".
_CHAT = re.compile(
    r"\b1 2 3\b|\b(?:how|need|want|got|have|going|try|love|like) 2(?= [a-z])"
    r"|\b[24](?= (?:an?|the|my|me|us|u|ur|your?|it|them|this|that|some|any|be|get|do|go)\b)",
    re.IGNORECASE,
)


def has_more_numbers(text: str, other: str) -> bool:
    """Return whether a text has a number that another one lacks; "2day", "4 a friend" and "one should" have none.

    In questions about numerals, "58" and "fifty-eight" are two.
    """
    words, there = set(words_in(other)), list(_numbers(other))
    possible = {value for value, names in _TABLES["may_stand_for"].items() if not words.isdisjoint(names.split())}
    known = {value for value, _ in there} | {Fraction(value) for value in possible}
    said = [(value, name) for value, name in _numbers(_CHAT.sub("", text)) if name != "one"]
    if _has(other.lower(), _TABLES["numerals"]):
        return not {value for value, name in said if not name} <= {value for value, name in there if not name}
    return not {value for value, _ in said} <= known


def _numbers(text: str) -> Iterator[tuple[Number, str]]:
    """Yield each number with its last word, "" for digits."""
    value: Number | None = None
    last = ""
    for match in _NUMBER.finditer(text):
        word = match[0].lower()
        name = word if word in _VALUES else word.removesuffix("s")
        said = _VALUES.get(name)
        if word == "and" and last in _SCALES:
            continue
        if name in _SCALES:
            value, last = (value if isinstance(value, Fraction) else 1) * Fraction(_SCALES[name]), name
        elif said is not None and last and isinstance(value, Fraction) and said < 10 <= value and value % 10 == 0:
            value, last = value + said, name  # "twenty-one", "two hundred and five"
        else:
            if value is not None:
                yield value, last
            value, last = said, name
            if match[2] and not (match[2] in "24" and len(match[3]) > 2):  # "2day"
                *others, value = _values(match[2], is_negative=match[1] is not None)
                yield from ((other, "") for other in others)
                last = ""
    if value is not None:
        yield value, last


def _values(digits: str, *, is_negative: bool) -> list[Number]:
    """Return the values of digits: "1,500" is one, "1,2" are two."""
    parts = re.sub(r",(?=\d{3}(?!\d))", "", digits).split(",")
    are_several = [":" in part or part.count(".") > 1 or len(part) > MAX_DIGITS for part in parts]
    sign = -1 if is_negative else 1
    return [part if several else sign * Fraction(part) for part, several in zip(parts, are_several, strict=True)]


# --- marks, units, opposites -----------------------------------------------------------------------------------------


_NUMBERS = "|".join([*_VALUES, *_SCALES])
_UNITS, _OPPOSITES = _TABLES["units"].values(), _TABLES["opposites"]
_MARKS = {name: ("|".join(mark["strong"]), "|".join(mark["weak"])) for name, mark in _TABLES["marks"].items()}
_NOT, _NOT_OTHERWISE = _MARKS.pop("not")
_CLAUSE = re.compile(r"[.!?;:,\n]|\b(?:and|but|or|because|although|though|so|if|when|while|that|which|who)\b")


@cache  # compiled when they are needed: an import must not wait for a hundred of them
def _pattern(alternatives: str) -> re.Pattern[str]:
    number = rf"(?:(?<!\d)\d{{1,12}}(?:[.,]\d{{1,12}}){{0,3}}|an?(?= (?:{'|'.join(_SCALES)}))|{_NUMBERS})"
    return re.compile(rf"(?<![a-z])(?:{alternatives})(?![a-z])".replace("N", number))


def _has(text: str, alternatives: str) -> bool:
    return _pattern(alternatives).search(text) is not None


def without_filler(text: str) -> str:
    """Return a text in lower case without the phrases that say nothing of what is asked."""
    return _pattern("|".join(_TABLES["filler"])).sub(" ", text.lower().replace("’", "'"))


def denies_more(text: str, other: str) -> bool:
    """Return whether more clauses of a text are negative than of another one, where "avoid" may be a negation."""
    counts = [sum(_has(clause, _NOT) for clause in _CLAUSE.split(one)) for one in (text, other)]
    return counts[0] > counts[1] + len(_pattern(_NOT_OTHERWISE).findall(other))


def has_more_marks(text: str, other: str) -> bool:
    """Return whether a text has a mark, as "only" or "at least", that another one has not."""
    return any(_has(text, strong) and not _has(other, f"{strong}|{weak}") for strong, weak in _MARKS.values())


def is_turned(question: str, rewrite: str) -> bool:
    """Return whether the rewrite lost a unit, or has the opposite of a word of the question in its place."""
    return any(_has(question, unit) and not _has(rewrite, unit) for unit in _UNITS) or any(
        _has(question, one) and _has(rewrite, other) and not _has(rewrite, one) and not _has(question, other)
        for pair in _OPPOSITES
        for one, other in (pair, pair[::-1])
    )


# --- statements ------------------------------------------------------------------------------------------------------

_SENTENCE = re.compile(
    rf"[.!?;:]+(?=\s|\Z)|\n+|,\s+(?=(?:but |so |and )?(?:{_TABLES['asks']})\b)"
    r"|\s(?=(?:if|unless|because|although|assuming)\b)|\s(?:when|while)\s"
)
_ASKS = re.compile(
    rf"\W*(?:(?:but|so|and|hi|hey|hello|please|pls|plz) )*(?:{_TABLES['asks']})\b|.*\b(?:what|how|why)\b"
)
_LITTLE = frozenset(_TABLES["little"].split())
_STEM = 3  # letters at the end in which forms of a word differ


def lost_statement(question: str, rewrite: str) -> bool:
    """Return whether the rewrite has fewer statements than the question, and most words of one of them are gone.

    What the asker heard, read or was told is no condition.
    """
    stated, words = list(_statements(question)), words_in(rewrite)
    if len(stated) <= len(list(_statements(rewrite))):
        return False
    return any(2 * sum(_is_among(word, words) for word in sentence) <= len(sentence) for sentence in stated)


def _statements(text: str) -> Iterator[list[str]]:
    """Yield the words that say something of each sentence that does not ask."""
    for sentence in _SENTENCE.split(text):
        words = [word for word in words_in(sentence) if word not in _LITTLE and len(word) > 1]
        if words and not _ASKS.match(sentence) and not _has(sentence, "|".join(_TABLES["backstory"])):
            yield words


def _is_among(word: str, words: Sequence[str]) -> bool:
    stem = word[: max(4, len(word) - _STEM)]
    if any(other.startswith(stem) for other in words):
        return True
    return bool(difflib.get_close_matches(word, words[:MAX_SPELLINGS], n=1, cutoff=CLOSE))
