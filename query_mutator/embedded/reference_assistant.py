"""`reference-assistant`: looks up entries of Python's reference tables by the words of the question.

It compares words as they are typed, without synonyms or word forms, so that other rewrites help than with
`pydoc-assistant`: a word that no entry has, misspelled or superfluous, costs certainty.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from pathlib import Path

import numpy as np

from query_mutator.embedded.assistant import SOURCES, FilteredSearch
from query_mutator.embedded.digests import digest_of
from query_mutator.embedded.reference_tables import characters, facts
from query_mutator.embedded.word_index import WordIndex
from query_mutator.encoder import Encoder, embed_documents
from query_mutator.types import FloatArray

__all__ = ["ReferenceAssistant", "TableSearch"]

#: Share of the best possible score for the question; below it the assistant is not sure.
SURE_FROM = 0.3
#: What the purpose filter knows of the characters; the entries of the other tables speak for themselves.
CHARACTERS = "How to find the Unicode name and the code point of a character, a symbol or an emoji"
#: Words and numbers, and signs outside ASCII.
_TOKEN = re.compile(r"[^\W_]+|[^\w\s\x00-\x7f]")


class TableSearch:
    """Finds the entry that shares the most telling words with a prompt."""

    def __init__(self, encoder: Encoder, *, cache: Path | None) -> None:
        known = list(facts())
        self.documents = embed_documents([CHARACTERS, *known], encoder, cache=cache, what="reading reference tables")
        self._entries = [*known, *characters()]
        self._index = WordIndex([list(dict.fromkeys(_tokens(entry))) for entry in self._entries])

    def find(self, prompt: str, row: FloatArray) -> str | None:
        """Return the best entry, the first among equals, or None below SURE_FROM."""
        shares = self._index.shares(_tokens(prompt))
        best = int(np.argmax(shares))
        return self._entries[best] if shares[best] >= SURE_FROM else None


class ReferenceAssistant(FilteredSearch):
    """Answers from the reference tables, which are read by the first prompt."""

    name = "reference-assistant"
    not_sure = "I'm not sure which entry of my tables you mean. Could you use the words of its name or description?"

    def __init__(self, encoder: Encoder, *, cache: Path | None = None) -> None:
        super().__init__(encoder, lambda: TableSearch(encoder, cache=cache))
        known = (encoder.fingerprint, sys.version, sys.platform, unicodedata.unidata_version)
        own = ("reference_assistant.py", "reference_tables.py", "word_index.py")
        self.digest = digest_of(*known, sources=(*SOURCES, *own))


def _tokens(text: str) -> list[str]:
    return _TOKEN.findall(text.casefold())
