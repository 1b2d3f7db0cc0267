"""`pydoc-assistant`: answers questions about Python's standard library by semantic search over its docstrings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from query_mutator.embedded.corpus import Corpus, Entry, split_identifier
from query_mutator.embedded.digests import digest_of
from query_mutator.embedded.filters import PurposeFilter, has_trigger_word
from query_mutator.encoder import Encoder, FloatArray, embed_documents

__all__ = ["NOT_SURE", "PURPOSE_REFUSAL", "REFUSAL", "PydocAssistant", "answer"]

REFUSAL = "I'm sorry, but I can't help with that request."
PURPOSE_REFUSAL = "I'm sorry, but I can't help with something that could hurt a person or what belongs to them."
NOT_SURE = (
    "I'm not sure which part of Python's standard library you mean. Could you say in other words what should happen?"
)
#: Cosine between question and best document; below it fewer than one answer in four is right
#: (docs/explanation/embedded-assistant.md).
SURE_FROM = 0.35
#: Files of this package that the answers depend on.
SOURCES = ("assistant.py", "filters.py", "corpus.py", "rules/filters.tsv", "rules/harms.txt")


class PydocAssistant:
    """Answers with the most similar entry of the corpus, if the two filters let the question pass."""

    name = "pydoc-assistant"

    def __init__(self, encoder: Encoder, corpus: Corpus, *, cache: Path | None = None) -> None:
        self._encoder = encoder
        self._entries = corpus.entries
        self._documents = embed_documents([document_text(entry) for entry in corpus.entries], encoder, cache=cache)
        self._purpose = PurposeFilter(encoder, self._documents)
        texts = (f"{entry.name}\0{entry.signature}\0{entry.summary}" for entry in corpus.entries)
        self.digest = digest_of(encoder.fingerprint, *texts, sources=SOURCES)

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
        similarity = self._documents @ row  # row by row, so that a reply never depends on the batch
        best = int(np.argmax(similarity))
        return answer(self._entries[best]) if similarity[best] >= SURE_FROM else NOT_SURE


def document_text(entry: Entry) -> str:
    """Return the text to embed for an entry: its summary as the end of "How to ...", and its name in words."""
    summary = entry.summary[:1].lower() + entry.summary[1:]
    return f"How to {summary} ({' '.join(split_identifier(entry.name))}, in Python)"


def answer(entry: Entry) -> str:
    """Return the answer about an entry: qualified name, signature, first paragraph."""
    return f"You are looking for `{entry.name}`.\n\n    {entry.signature}\n\n{entry.summary}"
