"""English words by frequency, from the vocabulary that comes with the default weights."""

from __future__ import annotations

import re
from functools import lru_cache

from query_mutator.encoder.weights import packaged_folder
from query_mutator.errors import EncoderError

__all__ = ["english_ranks", "english_words"]


@lru_cache(maxsize=1)
def english_ranks() -> dict[str, int]:
    """Return the whole words of the packaged vocabulary, lower case, by rank (0 is the most frequent).

    Only plain letters; word pieces are left out. Raises EncoderError when the package is not installed.
    """
    folder = packaged_folder()
    if folder is None:
        raise EncoderError("the English word list is missing; run `pip install -r requirements.txt`")
    lines = (folder / "vocab.txt").read_text(encoding="utf-8").splitlines()
    words = [word for word in lines if re.fullmatch(r"[a-z]+", word)]
    return {word: rank for rank, word in enumerate(words)}


def english_words() -> frozenset[str]:
    """Return the words of `english_ranks`."""
    return frozenset(english_ranks())
