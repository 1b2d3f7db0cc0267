"""The rules of a few lines: first part, added context, key words, merging, grammar."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

from query_mutator.embedded.rules.tables import load_rows, load_words
from query_mutator.embedded.rules.text import is_word, sentences, tidy, tokens, words

__all__ = ["Merge", "add_context", "first_part", "keywords", "repair"]

MIN_WORDS = 4  # of the first part of a question
MIN_KEYWORDS = 2
_ASKS = r"(?:how|what|which|who|where|when|can i|could i|should i|is there|does|do i)"
_NEXT = r"(?:then|also|second|secondly|next|afterwards|besides|after that|while we're at it|by the way|on top of that)"
#: Where a second question begins inside a sentence: "…, and how do I …", "… and also …", "…; which …".
_SECOND = re.compile(
    rf"[,;]?\s+(?:and|or|but|plus)\s+(?:{_NEXT}\b,?\s+)*(?={_ASKS}\b)"
    rf"|[,;]\s+(?:{_NEXT}\b,?\s+)*(?=(?:how|what|which|where|who)\b)"
    r"|,?\s+and (?:also|then|secondly)\b",
    re.IGNORECASE,
)
_OPENS = re.compile(rf"{_ASKS}\b|is\b|are\b|can\b|could\b|why\b", re.IGNORECASE)
_END = re.compile(r"[\s?.!,;:]+\Z")


def first_part(text: str) -> str:
    """Return the text up to where its second question begins, or the whole text if there is none."""
    found = sentences(text)
    asking = [at for at, sentence in enumerate(found) if sentence.endswith("?")]
    if len(asking) > 1:
        return " ".join(found[: asking[0] + 1])
    for match in _SECOND.finditer(text):
        head = text[: match.start()]
        if len(words(head)) >= MIN_WORDS and _OPENS.match(head.strip()):
            return tidy(head) + "?"
    return text


def add_context(text: str, domain: str) -> str:
    """Return "In <domain>: <question>"; a question that already names the field stays."""
    return text if domain.lower() in text.lower() else f"In {domain}: {text}"


def keywords(text: str) -> str:
    """Return the content words, each once, then the text in brackets at the end; fewer than two words stay."""
    question, bracket, aside = text.partition(" (") if text.endswith(")") else (text, "", "")
    stopwords = load_words("stopwords.txt")
    kept = {
        token.lower(): token
        for token in tokens(question)
        if (token[0].isalnum() or token[0] in "`\"_'")
        and not (is_word(token) and token.lower().replace("’", "'") in stopwords)
    }
    return " ".join(kept.values()) + bracket + aside if len(kept) >= MIN_KEYWORDS else text


class Merge:
    """Adds the key words of the nearest training question; `clean` corrects and neutralizes its words first."""

    def __init__(self, clean: Callable[[str], str]) -> None:
        self._clean = clean

    def __call__(self, text: str, neighbor: str | None) -> str:
        """Return the question followed by the neighbor's content words that it does not have."""
        known = load_words("stopwords.txt").union(words(text))
        added = dict.fromkeys(
            token.lower()
            for token in tokens(self._clean(neighbor or ""))
            if is_word(token) and token.lower() not in known
        )
        return f"{_END.sub('', text)}, like: {' '.join(added)}?" if added else text


def repair(text: str) -> str:
    """Return the text with second-language word order and forms replaced by English ones."""
    for pattern, new in _repairs():
        text = pattern.sub(new, text)
    return tidy(text)


@cache
def _repairs() -> tuple[tuple[re.Pattern[str], str], ...]:
    """Return the patterns of `repairs.tsv` with their replacements, in order."""
    return tuple((re.compile(pattern, re.IGNORECASE), new) for pattern, new in load_rows("repairs.tsv"))
