"""Embeddings of texts that are the same in every run, cached on disk.

The cache folder is `QUERY_MUTATOR_CACHE`, else a folder in `XDG_CACHE_HOME`. A damaged or unwritable cache costs time
and is only logged.
"""

from __future__ import annotations

import hashlib
import logging
import os
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from query_mutator.encoder.base import Encoder
from query_mutator.errors import DiskError
from query_mutator.files import atomic_write, user_cache_folder
from query_mutator.types import FloatArray

__all__ = ["cache_dir", "embed_documents", "sha256_of"]

logger = logging.getLogger(__name__)

_CHUNK = 64  # documents between two updates of the progress bar


def cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder for files that can be computed again."""
    if environ.get("QUERY_MUTATOR_CACHE"):
        return Path(environ["QUERY_MUTATOR_CACHE"]).expanduser()
    return user_cache_folder(environ)


def sha256_of(*parts: str) -> str:
    """Return one sha256 of several texts; ("ab", "c") and ("a", "bc") differ."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()


def embed_documents(
    texts: Sequence[str], encoder: Encoder, *, cache: Path | None = None, what: str = "reading the standard library"
) -> FloatArray:
    """Return one unit row per document, [n, dim], from the cache for texts and weights that were used before.

    `what` labels the progress bar.
    """
    path = (cache or cache_dir()) / f"embeddings-{sha256_of(encoder.fingerprint, *texts)[:24]}.npz"
    try:
        return _read_rows(path, shape=(len(texts), encoder.dim))
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        logger.warning("cached embeddings %s are damaged and are computed again: %s", path, error)
    rows = _encode_with_bar(texts, encoder, what)
    try:
        with atomic_write(path) as file:
            np.savez(file, rows=rows)
    except (DiskError, OSError) as error:
        logger.warning("cache cannot be written: %s", error)
    return rows


def _read_rows(path: Path, *, shape: tuple[int, int]) -> FloatArray:
    with np.load(path, allow_pickle=False) as saved:
        rows: FloatArray = saved["rows"]
    if rows.shape != shape or rows.dtype != np.float32 or not np.isfinite(rows).all():
        raise ValueError(f"expected finite float32 {shape}, found {rows.dtype} {rows.shape}")
    return rows


def _encode_with_bar(texts: Sequence[str], encoder: Encoder, what: str) -> FloatArray:
    from tqdm import tqdm

    rows = np.empty((len(texts), encoder.dim), np.float32)
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))  # similar lengths together need little padding
    with tqdm(total=len(texts), desc=what, unit="text", disable=None) as bar:
        for start in range(0, len(order), _CHUNK):
            chunk = order[start : start + _CHUNK]
            rows[chunk] = encoder.encode([texts[i] for i in chunk])
            bar.update(len(chunk))
    return rows
