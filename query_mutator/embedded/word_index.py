"""Search by shared words: BM25 (Robertson and Zaragoza 2009) over small documents."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from query_mutator.types import FloatArray

__all__ = ["WordIndex"]

#: BM25's saturation and length constants.
_K1, _B = 1.2, 0.5
_NOWHERE = (np.array([], np.intp), np.array([], np.float32))


class WordIndex:
    """BM25 over small documents, as a share of the best possible score for the question."""

    def __init__(self, documents: Sequence[Sequence[str]]) -> None:
        self._size = len(documents)
        mean = sum(map(len, documents)) / max(1, self._size)
        postings: dict[str, list[tuple[int, float]]] = defaultdict(list)
        for place, document in enumerate(documents):
            damp = _K1 * (1 - _B + _B * len(document) / mean)
            for word, count in Counter(document).items():
                postings[word].append((place, count * (_K1 + 1) / (count + damp)))
        self._postings = {
            word: (np.array([place for place, _ in found]), np.array([weight for _, weight in found], np.float32))
            for word, found in postings.items()
        }

    def shares(self, asked: Sequence[str]) -> FloatArray:
        """Return one score per document, [n]; words that no document has lower all scores."""
        scores = np.zeros(self._size, np.float32)
        total = 0.0
        for word in sorted(set(asked)):
            places, weights = self._postings.get(word, _NOWHERE)
            rarity = math.log(1 + (self._size - len(places) + 0.5) / (len(places) + 0.5))
            scores[places] += rarity * weights
            total += rarity
        return scores / total if total else scores
