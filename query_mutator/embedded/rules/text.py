"""Text as tokens: code and quoted strings are single tokens, and joining the tokens gives the text."""

from __future__ import annotations

import re

__all__ = ["agree", "capitalize", "is_word", "like", "sentences", "tidy", "tokens", "words"]

_TOKEN = re.compile(
    r"""
    `[^`]*`                                       # code between backticks
    | "[^"\n]*" | “[^”\n]*”                       # quoted strings
    | https?://\S+
    | [A-Za-z_]\w*(?:\.\w+)+(?:\(\))?             # dotted names, file names
    | [A-Za-z]*[_\d]\w*(?:\(\))?                  # identifiers with digits or underscores, numbers
    | [A-Za-z]+\(\)                               # calls
    | [A-Za-z]+(?:['’][A-Za-z]+)*                 # words
    | \s+ | .
    """,
    re.VERBOSE | re.DOTALL,
)
_WORD = re.compile(r"[A-Za-z]+(?:['’][A-Za-z]+)*\Z")
_SENTENCE_END = re.compile(r"(?<=[.!?…])[\"')\]]*\s+(?=[^\s])|\n+")
_CONSONANT_SOUND = re.compile(r"(?:uni[^m]|us[aeiu]|ut[fi]|u[rt][lc]|uu|eu|one)", re.IGNORECASE)
_SILENT_H = re.compile(r"(?:hour|honest|html|http|xml|sql\b)", re.IGNORECASE)
_ABBREVIATIONS = ("e.g.", "i.e.", "etc.", "vs.", "approx.")


def tokens(text: str) -> list[str]:
    """Return the tokens of the text; `"".join(tokens(text)) == text`."""
    return _TOKEN.findall(text)


def is_word(token: str) -> bool:
    """Return whether a token is a plain word: not code, a number or punctuation."""
    return _WORD.match(token) is not None


def words(text: str) -> list[str]:
    """Return the plain words of the text in lower case."""
    return [token.lower() for token in tokens(text) if is_word(token)]


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


def capitalize(text: str) -> str:
    """Return the text with its first letter in upper case, the rest untouched."""
    return text[:1].upper() + text[1:]


def agree(text: str) -> str:
    """Return the text with "a" and "an" chosen by the sound of the next word."""

    def article(match: re.Match[str]) -> str:
        vowel = match[2][0].lower() in "aeiou"
        sounds = (vowel and not _CONSONANT_SOUND.match(match[2])) or _SILENT_H.match(match[2]) is not None
        return f"{like(match[1], 'an' if sounds else 'a')} {match[2]}"

    return re.sub(r"\b([Aa]n?) ([A-Za-z]\w+)", article, text)


def tidy(text: str) -> str:
    """Return the text capitalized, without double spaces, stray commas and wrong articles."""
    text = re.sub(r"\s+", " ", text)
    text = re.sub(r"([,;:])(?:\s*[,;:])+", r"\1", text)
    text = re.sub(r"\s+([,.;:!?])(?=\s|$)", r"\1", text)
    text = re.sub(r"[,;:]\s*([.!?])", r"\1", text)
    text = re.sub(r"^[\s,;:.!?)\-–—…]+", "", text)
    text = re.sub(r"[\s,;:\-–—(]+$", "", text)
    return capitalize(agree(text))
