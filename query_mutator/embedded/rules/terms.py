"""Everyday words and other languages' jargon become the documentation's terms."""

from __future__ import annotations

from query_mutator.embedded.rules.phrases import PhraseTable
from query_mutator.embedded.rules.tables import load_rows


class Terms:
    """Rewrites everyday words by glossary."""

    def __init__(self) -> None:
        self._table = PhraseTable(load_rows("terms.tsv"))

    def glossary(self) -> set[str]:
        """Return every word of the glossary."""
        return {word for key in self._table.written() for word in key.split()}

    def __call__(self, text: str) -> str:
        """Return the text in the documentation's terms."""
        return self._table.apply(text)
