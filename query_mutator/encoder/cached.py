"""An encoder with a cache: every text is encoded once, whichever thread asks for it first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np

from query_mutator.encoder.base import Encoder
from query_mutator.encoder.remote import RemoteEncoder
from query_mutator.types import FloatArray

__all__ = ["CachedEncoder"]

MAX_TEXTS = 32_768  # 384 float32 each: 48 MiB when full
MAX_CHARS = 32_000_000  # of all texts in the cache: a server may answer with megabytes


class CachedEncoder:
    """Wraps an encoder in an LRU cache of texts; concurrent requests for one text are coalesced.

    Callers encode different texts at the same time. A caller that needs a text that another one is encoding waits for
    it after it has encoded its own.
    """

    def __init__(self, inner: Encoder, *, max_texts: int = MAX_TEXTS) -> None:
        self.name, self.dim, self.source, self.fingerprint = inner.name, inner.dim, inner.source, inner.fingerprint
        self.inner = inner
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
            if not texts or not all(text in self._rows for text in texts):
                return None
            for text in texts:
                self._rows.move_to_end(text)
            return np.array([self._rows[text] for text in texts])

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
                if text in self._rows:
                    self._rows.move_to_end(text)
                    found[text] = self._rows[text]
                elif text in self._in_flight:
                    awaited[text] = self._in_flight[text]
                else:
                    self._in_flight[text] = Future()
                    missing.append(text)
        return found, awaited, missing

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
