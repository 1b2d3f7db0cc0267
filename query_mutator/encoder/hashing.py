"""An encoder without weights, for tests and benchmarks."""

from __future__ import annotations

import itertools
import re
import zlib
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from query_mutator.encoder.base import readable, unit_rows
from query_mutator.types import FloatArray

__all__ = ["HashEncoder"]

HASH_DIM = 384
CACHED_WORDS = 65_536
_END = zlib.crc32(b"\0")  # keeps an empty text off the zero vector


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
