"""Encoders with a cache: every text is encoded once, whichever thread asks for it first.

`embed_documents` keeps the embeddings of texts that are the same in every run on disk. From a name to its encoder:

resolve_encoder("all-MiniLM-L6-v2")  ->  CachedEncoder(BertEncoder(...))
resolve_encoder("ollama:NAME")       ->  CachedEncoder(RemoteEncoder(...))     the server's /api/embed
resolve_encoder("hash")              ->  CachedEncoder(HashEncoder(...))       instant, for benchmarks; no torch
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import zipfile
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np

from query_mutator.encoder.base import Embed, Encoder, HashEncoder, RemoteEncoder
from query_mutator.encoder.weights import DEFAULT_ENCODER, EncoderSettings, Weights, find_weights
from query_mutator.errors import DiskError, EncoderError, reason_of
from query_mutator.files import atomic_write, user_cache_folder
from query_mutator.types import FloatArray

logger = logging.getLogger(__name__)

MAX_TEXTS = 32_768  # 384 float32 each: 48 MiB when full
MAX_CHARS = 32_000_000  # of all texts in the cache: a server may answer with megabytes


_CHUNK = 64  # documents between two updates of the progress bar


class CachedEncoder:
    """Wraps an encoder in an LRU cache of texts; concurrent requests for one text are coalesced.

    Callers encode different texts at the same time. A caller that needs a text that another one is encoding waits for
    it after it has encoded its own.
    """

    def __init__(self, inner: Encoder, *, max_texts: int = MAX_TEXTS) -> None:
        self.name, self.dim, self.source, self.fingerprint = inner.name, inner.dim, inner.source, inner.fingerprint
        self.inner = inner
        self.known: Mapping[str, FloatArray] = {}  # rows of texts that need no encoding (see `known`)
        self.gathers = False  # whether texts wait for others: a model that is called needs the same cores
        self._max_texts = max_texts
        self._rows: OrderedDict[str, FloatArray] = OrderedDict()
        self._chars = 0  # in the keys of `_rows`
        self._in_flight: dict[str, Future[FloatArray]] = {}
        self._lock = threading.Lock()

    @property
    def is_remote(self) -> bool:
        """Return whether a server makes the embeddings."""
        return isinstance(self.inner, RemoteEncoder)

    def __repr__(self) -> str:
        return f"CachedEncoder({self.inner!r})"

    def encode(self, texts: Sequence[str]) -> FloatArray:
        """Return one unit row per text, [n, dim]; equal texts are encoded once."""
        found, awaited, missing = self._claim(texts)
        if missing:
            found.update(self._encode_new(missing))
        for text, row in awaited.items():
            found[text] = row.result()
        return np.array([found[text] for text in texts]) if texts else np.empty((0, self.dim), np.float32)

    def get(self, texts: Sequence[str]) -> FloatArray | None:
        """Return the cached rows [n, dim] of the texts, or None if one of them is missing."""
        with self._lock:
            rows = [self._find(text) for text in texts]
            return np.array(rows) if rows and all(row is not None for row in rows) else None

    def put(self, texts: Sequence[str], rows: FloatArray) -> dict[str, FloatArray]:
        """Add rows [n, dim] that were computed with these weights; return them by text."""
        added = {text: row.copy() for text, row in zip(texts, rows, strict=True)}  # a view would keep its batch alive
        with self._lock:
            self._chars += sum(len(text) for text in added if text not in self._rows)
            self._rows.update(added)
            while len(self._rows) > self._max_texts or self._chars > MAX_CHARS:
                self._chars -= len(self._rows.popitem(last=False)[0])
        return added

    def close(self) -> None:
        """Clear the cache and close the encoder inside."""
        with self._lock:
            self._rows.clear()
            self._chars = 0
        self.inner.close()

    def _claim(self, texts: Sequence[str]) -> tuple[dict[str, FloatArray], dict[str, Future[FloatArray]], list[str]]:
        """Return the cached rows, the futures of texts in flight, and the texts that the caller now has to encode."""
        found: dict[str, FloatArray] = {}
        awaited: dict[str, Future[FloatArray]] = {}
        missing = []
        with self._lock:
            for text in dict.fromkeys(texts):
                row = self._find(text)
                if row is not None:
                    found[text] = row
                elif text in self._in_flight:
                    awaited[text] = self._in_flight[text]
                else:
                    self._in_flight[text] = Future()
                    missing.append(text)
        return found, awaited, missing

    def _find(self, text: str) -> FloatArray | None:
        """Return the row of a text that is cached or known, None for another; the caller holds the lock."""
        row = self._rows.get(text)
        if row is not None:
            self._rows.move_to_end(text)
        return self.known.get(text) if row is None else row

    def _encode_new(self, texts: Sequence[str]) -> dict[str, FloatArray]:
        """Encode texts that this caller has claimed, and resolve the futures that others wait for."""
        try:
            added = self.put(texts, self.inner.encode(texts))
        except BaseException as error:
            for text in texts:
                self._pop_future(text).set_exception(error)
            raise
        for text, row in added.items():
            self._pop_future(text).set_result(row)
        return added

    def _pop_future(self, text: str) -> Future[FloatArray]:
        with self._lock:
            return self._in_flight.pop(text)


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


def resolve_encoder(
    spec: str = DEFAULT_ENCODER,
    *,
    device: str = "cpu",
    deterministic: bool = False,
    max_tokens: int | None = None,
    embed: Embed | None = None,
    light: bool = False,
) -> CachedEncoder:
    """Return the encoder that `spec` names: a folder, a model name, `ollama:NAME` or `hash`.

    Longer texts are truncated to `max_tokens` and to the model's limit. `embed(model, texts)` calls the server for
    `ollama:NAME`. `light`: run plain BERT on a CPU without torch, which starts a second earlier and encodes many texts
    more slowly. Raises EncoderError for an encoder that is not available.
    """
    if max_tokens is not None and (spec == "hash" or spec.startswith("ollama:")):
        raise EncoderError(f"encoder {spec!r} reads whole texts; leave --encoder-max-tokens out")
    if spec == "hash":
        return CachedEncoder(HashEncoder())
    if spec.startswith("ollama:"):
        if embed is None:
            raise EncoderError(f"encoder {spec!r} needs an Ollama server; use --backend ollama or --ollama-url")
        return CachedEncoder(RemoteEncoder(spec.removeprefix("ollama:"), embed))
    settings = EncoderSettings(device=device, deterministic=deterministic, max_tokens=max_tokens)
    return CachedEncoder(_load(find_weights(spec), settings, light=light and device == "cpu" and not deterministic))


def _load(weights: Weights, settings: EncoderSettings, *, light: bool) -> Encoder:
    """Load plain BERT directly and everything else with sentence-transformers, which takes seconds to import."""
    from query_mutator.encoder.bert import is_plain_bert

    try:
        if is_plain_bert(weights.folder):
            if light:
                from query_mutator.encoder.bert_numpy import NumpyBert

                return NumpyBert(weights, settings)
            from query_mutator.encoder.bert_torch import BertEncoder

            return BertEncoder(weights, settings)
        from query_mutator.encoder.sentence_transformer import SentenceTransformerEncoder

        return SentenceTransformerEncoder(weights, settings)
    except Exception as error:  # each reader reports a broken file with its own exception types
        reason = reason_of(error)
        raise EncoderError(f"encoder {weights.name!r} ({weights.source}) cannot be loaded: {reason[:160]}") from error
