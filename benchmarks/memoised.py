"""Memoised calls for `benchmarks/learning.py`: a system whose replies and embeddings are kept in two files.

Calls at temperature 0 are deterministic, so a reply that is stored is the reply that a call would give. Replies are in
the product's own cache (`--cache all`); a reply that it does not have comes from the test server of this process.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from query_mutator.encoder import CachedEncoder, Encoder
from query_mutator.session.models import OpenModels, open_models
from query_mutator.settings import ModelSettings
from query_mutator.types import FloatArray

__all__ = ["StoredVectors", "memoised_system"]


class StoredVectors:
    """An encoder whose rows are appended to a file, from which the next process reads them."""

    def __init__(self, inner: Encoder, folder: Path) -> None:
        self.name, self.dim, self.source, self.fingerprint = inner.name, inner.dim, inner.source, inner.fingerprint
        self.inner = inner
        self._record = np.dtype([("key", "V32"), ("row", "<f4", (inner.dim,))])
        self._path = folder / f"vectors-{hashlib.sha256(inner.fingerprint.encode()).hexdigest()[:16]}.bin"
        self._rows: dict[bytes, FloatArray] = {}
        if self._path.exists():
            known = np.fromfile(self._path, dtype=self._record)  # whole records; a process may have been killed
            os.truncate(self._path, known.nbytes)
            self._rows = {key.tobytes(): row for key, row in zip(known["key"], known["row"], strict=True)}
        self._lock = threading.Lock()

    def encode(self, texts: Sequence[str]) -> FloatArray:
        """Return one unit row per text, [n, dim]."""
        keys = [hashlib.sha256(text.encode()).digest() for text in texts]
        missing = [index for index, key in enumerate(keys) if key not in self._rows]
        if missing:
            self._add([keys[index] for index in missing], self.inner.encode([texts[index] for index in missing]))
        return np.array([self._rows[key] for key in keys]) if keys else np.empty((0, self.dim), np.float32)

    def _add(self, keys: Sequence[bytes], rows: FloatArray) -> None:
        records = np.array(list(zip(keys, rows, strict=True)), dtype=self._record)
        with self._lock, self._path.open("ab") as file:
            file.write(records.tobytes())
            self._rows.update(zip(keys, rows, strict=True))


def memoised_system(settings: ModelSettings, folder: Path) -> OpenModels:
    """Return the system of `settings`, whose replies and embeddings are kept in `folder`; not those of a recording."""
    folder.mkdir(parents=True, exist_ok=True)
    if settings.backend != "recorded":
        settings = replace(settings, cache="all", cache_path=str(folder / "replies.sqlite"))
    system = open_models(settings)
    assert isinstance(system.encoder, CachedEncoder)
    system.encoder.inner = StoredVectors(system.encoder.inner, folder)
    return system
