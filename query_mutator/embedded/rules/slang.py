"""Slang: replace slang and chat abbreviations by plain English; fix repeated letters and dropped g's."""

from __future__ import annotations

import re
from itertools import product

from query_mutator.embedded.rules.lexicon import Lexicon
from query_mutator.embedded.rules.phrases import PhraseTable, previous_word
from query_mutator.embedded.rules.tables import grammar
from query_mutator.embedded.rules.text import is_word, like, tokens

__all__ = ["Slang"]

_SLASHED = {"w/o": "without", "w/": "with", "b/c": "because", "n/a": "missing"}
_BEFORE_LETTER = grammar("before-letter")


class Slang:
    """Rewrites slang by glossary."""

    def __init__(self, lexicon: Lexicon) -> None:
        self._table = PhraseTable.load("slang.tsv")
        self._lexicon = lexicon
        #: Every word of the glossary.
        self.glossary = frozenset(self._table.words())

    def __call__(self, text: str) -> str:
        """Return the text in plain English."""
        text = re.sub(
            r"\b(?:w/o|w/|b/c|n/a)(?=\s|$)", lambda match: _SLASHED[match[0].lower()], text, flags=re.IGNORECASE
        )
        fixed = "".join(like(token, self.fix(token.lower())) if is_word(token) else token for token in tokens(text))
        return self._table.apply(fixed, allow=_is_not_a_name)

    def fix(self, word: str) -> str:
        """Return "working" for "workin" and "please" for "pleeease"; known words stay."""
        if self._knows(word):
            return word
        if word.endswith("in") and self._knows(f"{word}g"):
            return f"{word}g"
        runs = [match[0] for match in re.finditer(r"(.)\1*", word)]
        if any(len(run) > 2 for run in runs):
            choices = [(run[0], run[:2]) if len(run) > 2 else (run,) for run in runs]
            return next((found for found in map("".join, product(*choices)) if self._knows(found)), word)
        return word

    def _knows(self, word: str) -> bool:
        return word in self.glossary or self._lexicon.knows(word)


def _is_not_a_name(parts: list[str], start: int, end: int) -> bool:
    """Return False for a single letter that names a number or a thing, or ends the text."""
    if len(parts[start]) > 1 or end - start > 1:
        return True
    return previous_word(parts, start) not in _BEFORE_LETTER and any(is_word(part) for part in parts[end:])
