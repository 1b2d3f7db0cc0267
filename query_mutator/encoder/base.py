"""The interface of sentence encoders, and two of them: feature hashing, and the sentence-transformers library."""

from __future__ import annotations

import hashlib
import os
import re
import threading
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from query_mutator.types import FloatArray

_END = zlib.crc32(b"\0")  # keeps an empty text off the zero vector


class Encoder(Protocol):
    """Texts to unit rows; `source` says in one line where it came from, `fingerprint` changes with the weights."""

    name: str
    dim: int
    source: str
    fingerprint: str

    def encode(self, texts: Sequence[str]) -> FloatArray:
        """Return one unit row per text, [n, dim]; thread-safe."""
        ...


def unit_rows(rows: FloatArray) -> FloatArray:
    """Return the rows [n, dim] scaled to length one; rows of zeros stay."""
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return (rows / np.where(norms > 0, norms, 1)).astype(np.float32)


class HashEncoder:
    """Feature hashing of words and character trigrams: deterministic, instant, no meaning beyond spelling."""

    name, source = "hash", "feature hashing, no weights"

    def __init__(self, dim: int = 384) -> None:
        self.dim = dim
        self.fingerprint = f"hash-{dim}"

    def encode(self, texts: Sequence[str]) -> FloatArray:
        """Return one unit row per text, [n, dim]."""
        rows = np.zeros((len(texts), self.dim), np.float32)
        for row, text in zip(rows, texts, strict=True):
            words = re.findall(r"\w+", text.lower())
            padded = (f"<{word}>" for word in words)
            features = [*words, *(word[i : i + 3] for word in padded for i in range(len(word) - 2))]
            hashes = np.array([_END, *(zlib.crc32(feature.encode()) for feature in features)], np.uint32)
            signs = np.where(hashes >> np.uint32(31), np.float32(1), np.float32(-1))
            np.add.at(row, hashes % np.uint32(self.dim), signs)
        return unit_rows(rows)


class LibraryEncoder:
    """Runs a folder or a model of the hub with sentence-transformers; `deterministic` encodes one text at a time."""

    def __init__(self, spec: str, *, device: str, deterministic: bool) -> None:
        self.name = spec.rstrip("/").rpartition("/")[2]
        self.source = f"local folder {spec}" if Path(spec).is_dir() else f"{spec} of the hub"
        self._rows = 1 if deterministic else 64
        self._model = _load(spec, device)
        self.dim = int(self._model.get_embedding_dimension())
        self._lock = threading.Lock()
        digest = hashlib.sha256(repr(sorted(self._model.tokenizer.get_vocab().items())).encode())
        for name, tensor in self._model.state_dict().items():
            digest.update(name.encode() + tensor.float().cpu().numpy().tobytes())
        self.fingerprint = digest.hexdigest() + (":one-row" if deterministic else "")

    def encode(self, texts: Sequence[str]) -> FloatArray:
        """Return one unit row per text, [n, dim]."""
        import torch

        with self._lock:
            if self._rows == 1:
                torch.set_num_threads(1)  # a setting of each calling thread
            settings = {"batch_size": self._rows, "normalize_embeddings": True, "show_progress_bar": False}
            return np.asarray(self._model.encode(list(texts), **settings), np.float32)


def _load(spec: str, device: str) -> Any:
    """Load a model, without a request to the hub if it is on this machine; no code or pickle of a model is run."""
    from sentence_transformers import SentenceTransformer
    from transformers.utils import logging

    settings = {"device": device, "trust_remote_code": False, "model_kwargs": {"use_safetensors": True}}
    logging.disable_progress_bar()
    try:
        return SentenceTransformer(spec, local_files_only=True, **settings)
    except Exception:
        if Path(spec).is_dir() or os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
            raise
        return SentenceTransformer(spec, **settings)
    finally:
        logging.enable_progress_bar()
