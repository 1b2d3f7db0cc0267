"""Expansion: the field's terms for what the question says in everyday words, added after it."""

from __future__ import annotations

from query_mutator.embedded.rules.phrases import PhraseTable
from query_mutator.embedded.rules.tables import load_rows
from query_mutator.embedded.rules.text import words

MAX_TERMS = 6


class Expand:
    """Adds terms where `Terms` would replace words; nothing of the question is lost."""

    def __init__(self) -> None:
        self._table = PhraseTable((*load_rows("terms.tsv"), *load_rows("corpus_terms.tsv"), *load_rows("synonyms.tsv")))

    def __call__(self, text: str) -> str:
        """Return the text followed by up to MAX_TERMS terms in brackets that it does not have yet."""
        said = " ".join(words(text))
        found = dict.fromkeys(meaning for meaning in self._table.meanings(text) if meaning.lower() not in said)
        return f"{text} ({', '.join(list(found)[:MAX_TERMS])})" if found else text
