"""Sentence encoders that `bert` cannot run, run by the sentence-transformers library."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from transformers.utils import logging as transformers_logging

from query_mutator.encoder.base import readable
from query_mutator.encoder.weights import EncoderSettings, Weights
from query_mutator.types import FloatArray


class SentenceTransformerEncoder:
    """Encodes texts with any sentence-transformers folder."""

    def __init__(self, weights: Weights, settings: EncoderSettings) -> None:
        self.name, self.source, self.fingerprint = weights.name, weights.source, settings.fingerprint(weights)
        self._settings = settings
        self._model = _load_quietly(weights.folder, device=settings.device)
        if settings.max_tokens is not None:
            self._model.max_seq_length = min(settings.max_tokens, self._model.max_seq_length or settings.max_tokens)
        self.dim = int(self._model.get_embedding_dimension() or 0)
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"SentenceTransformerEncoder({self.name})"

    def encode(self, texts: Sequence[str]) -> FloatArray:
        """Return one unit row per text, [n, dim]."""
        with self._lock:
            if self._settings.deterministic and torch.get_num_threads() != 1:  # a setting of each calling thread
                torch.set_num_threads(1)
            rows = self._model.encode(
                readable(texts), batch_size=self._settings.rows, normalize_embeddings=True, show_progress_bar=False
            )
        return np.asarray(rows, np.float32)

    def close(self) -> None:
        """Do nothing; the weights are freed with the encoder."""


def _load_quietly(folder: Path, *, device: str) -> SentenceTransformer:
    """Load with sentence-transformers, without its progress bar."""
    transformers_logging.disable_progress_bar()
    try:
        return SentenceTransformer(str(folder), device=device, local_files_only=True, trust_remote_code=False)
    finally:
        transformers_logging.enable_progress_bar()
