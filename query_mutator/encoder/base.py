"""What every sentence encoder offers, and two without weights here: feature hashing, and a model server."""

from __future__ import annotations

import hashlib
import itertools
import re
import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Protocol

import numpy as np

from query_mutator.errors import BackendError, EncoderError
from query_mutator.types import FloatArray

READ_CHARS = 100_000  # of one text: more than any encoder's context; tokenizing megabytes takes gigabytes

HASH_DIM = 384
CACHED_WORDS = 65_536
_END = zlib.crc32(b"\0")  # keeps an empty text off the zero vector

#: (model, texts, keep) -> rows [n, dim]; calls `keep` with the rows while the call still counts as in flight
Embed = Callable[[str, Sequence[str], Callable[[FloatArray], None]], FloatArray]

TEXTS_AT_ONCE = 256  # in a request: a server's replies are bounded

PROBE = "What does this encoder make of a plain sentence?"


class Encoder(Protocol):
    """Texts to unit rows; `source` says in one line where it came from, `fingerprint` changes with the weights."""

    name: str
    dim: int
    source: str
    fingerprint: str

    def encode(self, texts: Sequence[str]) -> FloatArray:
        """Return one unit row per text, [n, dim]; thread-safe."""
        ...

    def close(self) -> None:
        """Release what the encoder holds; idempotent."""
        ...


def readable(texts: Sequence[str]) -> list[str]:
    """Return the beginning of each text, as much as an encoder may read."""
    return [text[:READ_CHARS] for text in texts]


def unit_rows(rows: FloatArray) -> FloatArray:
    """Return the rows [n, dim] scaled to length one; rows of zeros stay."""
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return (rows / np.where(norms > 0, norms, 1)).astype(np.float32)


class HashEncoder:
    """Feature hashing of words and character trigrams: deterministic, instant, no torch, no meaning beyond spelling."""

    def __init__(self, dim: int = HASH_DIM) -> None:
        self.name = "hash"
        self.dim = dim
        self.source = "feature hashing, no weights"
        self.fingerprint = f"hash-{dim}"

    def __repr__(self) -> str:
        return f"HashEncoder(dim={self.dim})"

    def encode(self, texts: Sequence[str]) -> FloatArray:
        """Return one unit row per text, [n, dim]."""
        rows = np.zeros((len(texts), self.dim), np.float32)
        for row, text in zip(rows, readable(texts), strict=True):
            words = re.findall(r"\w+", text.lower())
            hashes = np.array([_END, *itertools.chain.from_iterable(map(_word_hashes, words))], np.uint32)
            signs = np.where(hashes >> np.uint32(31), np.float32(1), np.float32(-1))
            np.add.at(row, hashes % np.uint32(self.dim), signs)
        return unit_rows(rows)

    def close(self) -> None:
        """Do nothing; there are no weights to release."""


@lru_cache(maxsize=CACHED_WORDS)
def _word_hashes(word: str) -> tuple[int, ...]:
    """Return the hashes of a word and of its character trigrams."""
    padded = f"<{word}>"
    features = [word, *(padded[i : i + 3] for i in range(len(padded) - 2))]
    return tuple(zlib.crc32(feature.encode()) for feature in features)


class RemoteEncoder:
    """Normalizes the embeddings of a model server; `embed(model, texts, keep)` makes the call."""

    def __init__(self, model: str, embed: Embed) -> None:
        self.name = f"ollama:{model}"
        self.source = f"model {model} on the Ollama server"
        self._model = model
        self._embed = embed
        #: Callback for texts and their unit rows [n, dim], called before they are used.
        self.on_encoded: Callable[[Sequence[str], FloatArray], None] = lambda texts, rows: None
        self.dim = 0  # unknown until the first row
        probe = self._encode([PROBE])
        self.dim = int(probe.shape[1])
        # A server may serve other weights under the same name: the vector of one sentence tells them apart.
        self.fingerprint = hashlib.sha256(f"{model}:{np.round(probe, 3).tolist()}".encode()).hexdigest()

    def __repr__(self) -> str:
        return f"RemoteEncoder({self._model})"

    def encode(self, texts: Sequence[str]) -> FloatArray:
        """Return one unit row per text, [n, dim]; BackendError for rows of another length than the first ones."""
        starts = range(0, len(texts), TEXTS_AT_ONCE)
        rows = [self._encode(texts[start : start + TEXTS_AT_ONCE]) for start in starts]
        return np.concatenate(rows) if rows else np.empty((0, self.dim), np.float32)

    def _encode(self, texts: Sequence[str]) -> FloatArray:
        kept: list[FloatArray] = []

        def keep(rows: FloatArray) -> None:
            kept.append(self._unit(np.asarray(rows, np.float32), count=len(texts)))
            self.on_encoded(texts, kept[-1])

        self._embed(self._model, [text or " " for text in readable(texts)], keep)  # servers reject ""
        return kept[-1]

    def _unit(self, rows: FloatArray, *, count: int) -> FloatArray:
        if rows.ndim != 2 or rows.shape[1] == 0 or not (self.dim or rows.any()):
            raise EncoderError(f"model {self._model!r} gave no embeddings; choose another, such as ollama:all-minilm")
        if rows.shape != (count, self.dim or rows.shape[1]):
            shape = " x ".join(map(str, rows.shape))
            raise BackendError(f"model {self._model!r} gave {shape} embeddings in place of {count} x {self.dim}")
        if not np.isfinite(rows).all():
            raise BackendError(f"model {self._model!r} gave embeddings that are not finite numbers")
        with np.errstate(over="ignore"):  # beyond 1e19 a row's norm is infinite, and the row becomes zero
            return unit_rows(rows)

    def close(self) -> None:
        """Do nothing; the client owns the connection."""
