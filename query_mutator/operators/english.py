"""What local cleaning may touch: ordinary English text, and in it words that are not quoted, code, numbers or names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from importlib import resources

from query_mutator.encoder import vocabulary
from query_mutator.operators.guards import LANGUAGES

MAX_CHARS = 4_000  # longer texts are documents
MIN_KNOWN_SHARE = 0.5  # of the words, in a text without function words of any language
MAX_FOREIGN_SHARE = 0.2  # of the letters that are not ASCII
#: Words that requests begin with; together with the function words they show that a text is English.
_REQUESTS = "by many much tell give write add subtract multiply divide convert translate"

#: Quoted text is one piece, like each run of spaces and each run of other characters.
_PIECE = re.compile(
    r"`[^`]*`|\"[^\"\n]*\"|“[^”\n]*”|‘[^’\n]*’|«[^»\n]*»|(?<![^\s(\[])'[^'\n]+'(?!\w)|\s+|[^\s`\"“‘«]+|.", re.DOTALL
)
#: A word of plain letters between brackets and sentence marks; "a.b", "x1", "my_name", "café", "km/h" are none.
_WORD = re.compile(r"([(\[]*)([A-Za-z]+(?:-[A-Za-z]+)*(?:['’][A-Za-z]+)?)([.,;:!?)\]…]*)")
#: What ordinary prose does not have, and a few beginnings of lines of code.
_CODE = re.compile(
    r"```|[{}\\|]|;\s*$|\w\(\S*\)|[=!<>]=|[=-]>|::|\w ?= ?[\w\"'\[(]|</?\w+>|^Traceback|^\s*File \"|^ {4}\S|^\t"
    r"|^\s*(?:def|class|import|from|return|print) \S+.*[:;*,(]|^\s*import \w+\s*$|^\s*[$>]{1,3} \w"
    r"|^\s*(?:(?i:select)\b.+\b(?i:from)\b.+(?:\b(?i:where)\b|;)|(?:SELECT|INSERT|UPDATE|DELETE|CREATE|DROP|ALTER) )",
    re.MULTILINE,
)


_SENTENCE_END = re.compile(r"(?<=[.!?…])[\"')\]]*\s+(?=[^\s])|\n+")
_ABBREVIATIONS = ("e.g.", "i.e.", "etc.", "vs.", "approx.")


@cache
def english_ranks() -> dict[str, int]:
    """Return the whole words of the encoder's vocabulary by rank; 0 is the most frequent."""
    words = (word for word in vocabulary() if re.fullmatch(r"[a-z]+", word))
    return {word: rank for rank, word in enumerate(words)}


@cache
def english_words() -> frozenset[str]:
    """Return the words of `english_ranks`."""
    return frozenset(english_ranks())


@cache
def lines_of(name: str) -> tuple[str, ...]:
    """Return the lines of a data file of this room without its comments."""
    text = resources.files("query_mutator.operators").joinpath(name).read_text(encoding="utf-8")
    return tuple(line for line in text.splitlines() if line.strip() and not line.startswith("# "))


@cache
def words_of(name: str) -> frozenset[str]:
    """Return all words of a data file of this room."""
    return frozenset(word for line in lines_of(name) for word in line.split())


@cache
def chat_words() -> dict[str, str]:
    """Return what the short forms of chat stand for."""
    return dict(line.split("\t") for line in lines_of("chat.tsv"))


def is_english(text: str) -> bool:
    """Return whether a text is an ordinary English one of a few paragraphs at most, without code."""
    words = re.findall(r"[^\W\d_]+", text.lower())
    letters = sum(map(len, words))
    if not letters or len(text) > MAX_CHARS or _CODE.search(text):
        return False
    if sum(not letter.isascii() for word in words for letter in word) > MAX_FOREIGN_SHARE * letters:
        return False
    hits = {name: sum(word in frequent for word in words) for name, frequent in LANGUAGES.items()}
    english = hits.pop("en") + sum(word in _REQUESTS.split() for word in words)
    if english or any(hits.values()):
        return english > 0 and english >= max(hits.values())
    return sum(word in english_ranks() or word in chat_words() for word in words) >= MIN_KNOWN_SHARE * len(words)


def pieces(text: str) -> list[str]:
    """Return the pieces of a text in order, spaces included; joining them gives the text."""
    return _PIECE.findall(text)


def split_word(piece: str) -> Sequence[str] | None:
    """Return what precedes a piece's word, the word and the marks after it; None if the piece is not a plain word."""
    found = _WORD.fullmatch(piece)
    return found.groups() if found else None


def sentences(text: str) -> list[str]:
    """Return the sentences of the text, stripped, none empty."""
    found: list[str] = []
    for piece in _SENTENCE_END.split(text.strip()):
        if found and found[-1].lower().endswith(_ABBREVIATIONS):
            found[-1] = f"{found[-1]} {piece}"
        elif piece.strip():
            found.append(piece.strip())
    return found


def like(model: str, word: str) -> str:
    """Return `word` with the capitals of `model`: none, the first letter, or all."""
    if len(model) > 1 and model.isupper():
        return word.upper()
    return word[:1].upper() + word[1:] if model[:1].isupper() else word
