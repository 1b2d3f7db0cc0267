"""From a name to its encoder, with a cache in which every text is encoded once, whichever thread asks for it first."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np

from query_mutator.encoder.base import Encoder, HashEncoder, LibraryEncoder
from query_mutator.encoder.minilm import DEFAULT_ENCODER, MiniLM
from query_mutator.errors import EncoderError, reason_of
from query_mutator.types import FloatArray

MAX_TEXTS = 32_768  # 384 float32 each: 48 MiB when full
READ_CHARS = 100_000  # of one text: more than any encoder's context


class CachedEncoder:
    """Wraps an encoder in an LRU cache of texts; a caller waits for a text that another one is encoding."""

    def __init__(self, inner: Encoder, *, max_texts: int = MAX_TEXTS) -> None:
        self.name, self.dim, self.source, self.fingerprint = inner.name, inner.dim, inner.source, inner.fingerprint
        self.inner = inner
        self.known: Callable[[str], FloatArray | None] = lambda text: None  # rows of texts that need no encoding
        self._max_texts = max_texts
        self._rows: OrderedDict[bytes, FloatArray | Future[FloatArray]] = OrderedDict()
        self._lock = threading.Lock()

    def encode(self, texts: Sequence[str]) -> FloatArray:
        """Return one unit row per text, [n, dim]; equal texts are encoded once."""
        found: dict[str, FloatArray | Future[FloatArray]] = {}
        mine: dict[str, Future[FloatArray]] = {}
        with self._lock:
            for text in dict.fromkeys(texts):
                row = self._find(text)
                if row is None:
                    row = self._rows[_key(text)] = mine[text] = Future()
                found[text] = row
        if mine:
            self._encode_new(mine)
        rows = [row.result() if isinstance(row := found[text], Future) else row for text in texts]
        return np.array(rows) if rows else np.empty((0, self.dim), np.float32)

    def get(self, texts: Sequence[str]) -> FloatArray | None:
        """Return the cached rows [n, dim] of the texts, or None if one of them is missing."""
        with self._lock:
            found = [self._find(text) for text in texts]
        rows = [row for row in found if isinstance(row, np.ndarray)]
        return np.array(rows) if rows and len(rows) == len(found) else None

    def put(self, texts: Sequence[str], rows: FloatArray) -> None:
        """Add rows [n, dim] that were computed with these weights."""
        with self._lock:
            self._rows.update({_key(text): row.copy() for text, row in zip(texts, rows, strict=True)})
            while len(self._rows) > self._max_texts:
                self._rows.popitem(last=False)

    def _find(self, text: str) -> FloatArray | Future[FloatArray] | None:
        """Return the row of a text that is cached, in flight or known, None for another; the caller holds the lock."""
        if (key := _key(text)) not in self._rows:
            return self.known(text)
        self._rows.move_to_end(key)
        return self._rows[key]

    def _encode_new(self, mine: Mapping[str, Future[FloatArray]]) -> None:
        """Encode texts that this caller has claimed, and resolve the futures that others wait for."""
        try:
            rows = self.inner.encode([text[:READ_CHARS] for text in mine])
            self.put(list(mine), rows)
        except BaseException as error:
            with self._lock:
                for text, future in mine.items():
                    self._rows.pop(_key(text), None)
                    future.set_exception(error)
            raise
        for future, row in zip(mine.values(), rows, strict=True):
            future.set_result(row)


def _key(text: str) -> bytes:
    """Return a digest of a text, so that a long one takes no more memory than its row."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def resolve_encoder(spec: str = DEFAULT_ENCODER, *, device: str = "cpu", deterministic: bool = False) -> CachedEncoder:
    """Return the encoder that `spec` names: the bundled one, `hash`, a folder or a model of the hub.

    `device` is that of the last two; the others run on a CPU. EncoderError for an encoder that is not available.
    """
    if spec == DEFAULT_ENCODER:
        return CachedEncoder(MiniLM(deterministic=deterministic))
    if spec == "hash":
        return CachedEncoder(HashEncoder())
    if (spec.startswith((".", "~", "/")) or ":" in spec) and not Path(spec).is_dir():
        raise EncoderError(f"encoder folder {spec} does not exist; give a folder or a name such as {DEFAULT_ENCODER}")
    try:
        return CachedEncoder(LibraryEncoder(spec, device=device, deterministic=deterministic))
    except ImportError as error:
        raise EncoderError(
            f'encoder {spec!r} needs sentence-transformers; run `pip install "query-mutator[train]"`'
        ) from error
    except Exception as error:  # a broken file raises what its reader does, the hub client a dozen types
        advice = f"give a folder, a name of the hub or {DEFAULT_ENCODER}"
        raise EncoderError(f"encoder {spec!r} cannot be loaded ({reason_of(error)[:160]}); {advice}") from error
