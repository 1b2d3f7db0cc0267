"""What every sentence encoder offers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from query_mutator.types import FloatArray

__all__ = ["Encoder", "readable", "unit_rows"]

READ_CHARS = 100_000  # of one text: more than any encoder's context; tokenizing megabytes takes gigabytes


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
