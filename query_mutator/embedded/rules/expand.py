"""Expansion: what the question means in the field's terms, added after it."""

from __future__ import annotations

from query_mutator.embedded.rules.phrasebook import Phrasebook


class Expand:
    """Adds a phrase where `Terms` would replace words; nothing of the question is lost."""

    def __init__(self, phrasebook: Phrasebook) -> None:
        self._phrasebook = phrasebook

    def __call__(self, text: str) -> str:
        """Return the text followed by the phrase in brackets, in place of one added earlier."""
        question, _, last = text.removesuffix(")").rpartition(" (")
        if last not in self._phrasebook:
            question = text
        meaning = self._phrasebook.meaning(question)
        return text if meaning is None else f"{question} ({meaning})"
