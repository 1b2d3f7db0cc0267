"""Expansion: add what a question in everyday words means in technical terms, found by words and by similarity.

A row of the phrasebook is a technical phrase and everyday ways to ask for the same. A question is compared with every
row twice: by shared words (`WordIndex`) and by the cosine of the embeddings.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from functools import lru_cache
from hashlib import sha256
from importlib import resources

import numpy as np

from query_mutator.embedded.rules.essential import has_essentials
from query_mutator.embedded.rules.inflect import stems
from query_mutator.embedded.rules.tables import load_rows, load_words
from query_mutator.embedded.rules.text import words
from query_mutator.embedded.word_index import WordIndex
from query_mutator.encoder import Encoder, embed_documents, unit_rows
from query_mutator.types import FloatArray

__all__ = ["VECTORS", "Phrasebook", "embed_rows", "row_vectors", "texts_sha256"]

ROWS, VECTORS = "phrasebook.tsv", "phrasebook.npz"
#: The weight of shared words next to the cosine.
_WORDS_WEIGHT = 0.2
#: The technical phrase counts twice among the words, and half as much as the everyday ones in the embedding.
_TERM_WORDS, _TERM_VECTOR = 2, 0.5
#: Rows with a lower score do not match the question.
MIN_SCORE = 0.4


class Phrasebook:
    """Finds the technical phrase for a question; without an encoder by shared words alone."""

    def __init__(self, encoder: Encoder | None = None) -> None:
        self._rows = load_rows(ROWS)
        self._known = frozenset(row[0] for row in self._rows)
        self._index = WordIndex([_stems(" ".join((*row, *row[:1] * (_TERM_WORDS - 1)))) for row in self._rows])
        self._encoder = encoder
        self._vectors = None if encoder is None else row_vectors(encoder)  # [rows, D]

    def expand(self, text: str) -> str:
        """Return the text followed by the phrase in brackets, which replaces one that was added before."""
        question = self._without_phrase(text)
        meaning = self.meaning(question)
        return text if meaning is None else f"{question} ({meaning})"

    def alone(self, text: str) -> str:
        """Return the phrase without the question, which stays in front where it names whom or what it is about."""
        question = self._without_phrase(text)
        meaning = self.meaning(question)
        if meaning is None or has_essentials(question):
            return self.expand(text)
        return meaning

    def _without_phrase(self, text: str) -> str:
        question, _, last = text.removesuffix(")").rpartition(" (")
        return question if last in self._known else text

    def meaning(self, text: str) -> str | None:
        """Return the phrase of the best row, or None if no row matches."""
        row = self._best_row(text)
        return None if row is None else row[0]

    def _best_row(self, text: str) -> Sequence[str] | None:
        """Return the row with the highest score, or None if no row matches."""
        scores = _WORDS_WEIGHT * self._index.shares(_stems(text))
        if self._encoder is not None and self._vectors is not None:
            scores += self._vectors @ self._encoder.encode([text])[0]
        else:
            scores /= _WORDS_WEIGHT
        best = int(np.argmax(scores))
        return self._rows[best] if scores[best] >= MIN_SCORE else None


def row_vectors(encoder: Encoder) -> FloatArray:
    """Return a unit row per row of the phrasebook, [n, D]: the packaged ones if weights and texts are the same."""
    with io.BytesIO(resources.files(__package__).joinpath(VECTORS).read_bytes()) as file, np.load(file) as saved:
        if str(saved["weights"]) == encoder.fingerprint.partition(":")[0] and str(saved["texts"]) == texts_sha256():
            return unit_rows(saved["rows"].astype(np.float32))
    return embed_rows(encoder)


def embed_rows(encoder: Encoder) -> FloatArray:
    """Return the rows' embeddings [n, D]: the mean over their phrases."""
    rows = load_rows(ROWS)
    vectors = iter(embed_documents([phrase for row in rows for phrase in row], encoder))
    means = np.empty((len(rows), encoder.dim), np.float32)
    for place, row in enumerate(rows):
        term, *everyday = [next(vectors) for _ in row]
        means[place] = _TERM_VECTOR * term + np.mean(everyday, axis=0)
    return unit_rows(means)


def texts_sha256() -> str:
    """Return the sha256 of the phrasebook's rows."""
    return sha256("\n".join("\t".join(row) for row in load_rows(ROWS)).encode()).hexdigest()


def _stems(text: str) -> list[str]:
    stopwords = load_words("stopwords.txt")
    return [_stem(word) for word in words(text) if word not in stopwords]


@lru_cache(maxsize=16_384)
def _stem(word: str) -> str:
    return min(stems(word), key=lambda stem: (len(stem), stem), default=word)
