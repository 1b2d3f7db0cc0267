"""`pydoc-assistant`: answers questions about Python's standard library by semantic search over its docstrings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np

from query_mutator.embedded.corpus import Corpus, Entry, split_identifier
from query_mutator.embedded.digests import digest_of
from query_mutator.embedded.filters import PurposeFilter, has_trigger_word
from query_mutator.encoder import Encoder, embed_documents
from query_mutator.types import FloatArray

__all__ = ["NOT_SURE", "PURPOSE_REFUSAL", "REFUSAL", "SOURCES", "FilteredSearch", "PydocAssistant", "answer"]

REFUSAL = "I'm sorry, but I can't help with that request."
PURPOSE_REFUSAL = "I'm sorry, but I can't help with something that could hurt a person or what belongs to them."
NOT_SURE = (
    "I'm not sure which part of Python's standard library you mean. Could you say in other words what should happen?"
)
#: Cosine between question and best document; below it fewer than one answer in four is right
#: (docs/explanation/embedded-assistant.md).
SURE_FROM = 0.35
#: Files of this package that the answers depend on.
SOURCES = ("assistant.py", "filters.py", "corpus.py", "rules/essential.py", "rules/filters.tsv", "rules/harms.txt")


class Search(Protocol):
    """Finds the answer to a prompt among documents."""

    documents: FloatArray  # [n, dim], one unit row per document that the purpose filter compares a prompt with

    def find(self, prompt: str, row: FloatArray) -> str | None:
        """Return the answer to a prompt with the embedding `row` [dim], or None if no document is near enough."""
        ...


class FilteredSearch:
    """Answers what a search finds, if the two filters let the question pass; `load` is called by the first prompt."""

    not_sure = NOT_SURE

    def __init__(self, encoder: Encoder, load: Callable[[], Search]) -> None:
        self._encoder = encoder
        self._load = load

    @cached_property
    def _search(self) -> Search:
        return self._load()

    @cached_property
    def _purpose(self) -> PurposeFilter:
        return PurposeFilter(self._encoder, self._search.documents)

    def reply_many(self, prompts: Sequence[str]) -> list[str]:
        """Return one answer per prompt; all are encoded in one call."""
        rows = self._encoder.encode(prompts)  # [n, dim]
        harmful = self._purpose.refuses(prompts, rows)
        return [self._reply(*each) for each in zip(prompts, rows, harmful, strict=True)]

    def _reply(self, prompt: str, row: FloatArray, harmful: bool) -> str:
        if harmful:
            return PURPOSE_REFUSAL
        if has_trigger_word(prompt):
            return REFUSAL
        found = self._search.find(prompt, row)
        return self.not_sure if found is None else found


class DocstringSearch:
    """Finds the entry of a corpus whose embedding is nearest."""

    def __init__(self, encoder: Encoder, corpus: Corpus, *, cache: Path | None) -> None:
        self._entries = corpus.entries
        self.documents = embed_documents([document_text(entry) for entry in corpus.entries], encoder, cache=cache)

    def find(self, prompt: str, row: FloatArray) -> str | None:
        """Return the answer about the nearest entry, or None below SURE_FROM."""
        similarity = self.documents @ row  # row by row, so that a reply never depends on the batch
        best = int(np.argmax(similarity))
        return answer(self._entries[best]) if similarity[best] >= SURE_FROM else None


class PydocAssistant(FilteredSearch):
    """Answers with the most similar entry of the corpus; all entries are embedded at once."""

    name = "pydoc-assistant"

    def __init__(self, encoder: Encoder, corpus: Corpus, *, cache: Path | None = None) -> None:
        search = DocstringSearch(encoder, corpus, cache=cache)
        super().__init__(encoder, lambda: search)
        texts = (f"{entry.name}\0{entry.signature}\0{entry.summary}" for entry in corpus.entries)
        self.digest = digest_of(encoder.fingerprint, *texts, sources=SOURCES)


def document_text(entry: Entry) -> str:
    """Return the text to embed for an entry: its summary as the end of "How to ...", and its name in words."""
    summary = entry.summary[:1].lower() + entry.summary[1:]
    return f"How to {summary} ({' '.join(split_identifier(entry.name))}, in Python)"


def answer(entry: Entry) -> str:
    """Return the answer about an entry: qualified name, signature, first paragraph."""
    return f"You are looking for `{entry.name}`.\n\n    {entry.signature}\n\n{entry.summary}"
