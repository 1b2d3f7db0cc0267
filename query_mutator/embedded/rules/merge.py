"""Merging: the question with the key words of the nearest question from the training set."""

from __future__ import annotations

import re
from collections.abc import Callable

from query_mutator.embedded.rules.tables import load_words
from query_mutator.embedded.rules.text import is_word, tokens, words

_END = re.compile(r"[\s?.!,;:]+\Z")


class Merge:
    """Adds what the neighbour says in other words; `clean` spells and words it neutrally first."""

    def __init__(self, clean: Callable[[str], str]) -> None:
        self._clean = clean
        self._stopwords = load_words("stopwords.txt")

    def __call__(self, text: str, neighbour: str | None) -> str:
        """Return the question and, in brackets, the neighbour's content words it does not have itself."""
        said = set(words(text))
        added = dict.fromkeys(
            token.lower()
            for token in tokens(self._clean(neighbour or ""))
            if is_word(token) and token.lower() not in said | self._stopwords
        )
        return f"{_END.sub('', text)}, like: {' '.join(added)}?" if added else text
