"""The sentence encoder: texts to unit vectors, remembered, from wherever its weights are found.

    resolve_encoder("all-MiniLM-L6-v2")  ->  Remember(BertEncoder(...))
    resolve_encoder("ollama:NAME")       ->  Remember(RemoteEncoder(...))     the server's /api/embed
    resolve_encoder("hash")              ->  Remember(HashEncoder(...))       instant, for benchmarks; no torch

Importing this module loads numpy only.
"""

from __future__ import annotations

import hashlib
import logging
import re
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from query_mutator.encoder.weights import DEFAULT_ENCODER, Running, Weights, find_weights, packaged_folder
from query_mutator.errors import EncoderError

logger = logging.getLogger(__name__)

FloatArray = NDArray[np.float32]
Embed = Callable[[str, Sequence[str]], FloatArray]

REMEMBERED_TEXTS = 32_768  # 384 float32 each: 48 MiB when full
HASH_DIM = 384


class Encoder(Protocol):
    """Texts to unit rows; `source` says in one line where it came from, `fingerprint` changes with the weights."""

    name: str
    dim: int
    source: str
    fingerprint: str

    def encode(self, texts: Sequence[str]) -> FloatArray:
        """Return one unit row per text, [n, dim]; safe to call from any thread."""
        ...

    def close(self) -> None:
        """Give back what the encoder holds; may be called twice."""
        ...


def resolve_encoder(
    spec: str = DEFAULT_ENCODER,
    *,
    device: str = "cpu",
    deterministic: bool = False,
    micro_batch: int = 64,
    max_tokens: int | None = None,
    embed: Embed | None = None,
) -> Encoder:
    """Return the encoder that `spec` names: a folder, a model name, `ollama:NAME` or `hash`.

    Of a longer text the first `max_tokens` are read, as far as the model goes. `embed(model, texts)` reaches the server
    for `ollama:NAME`. An encoder that cannot be had is an EncoderError.
    """
    if max_tokens is not None and (spec == "hash" or spec.startswith("ollama:")):
        raise EncoderError(f"encoder {spec!r} reads whole texts; leave --encoder-max-tokens out")
    if spec == "hash":
        return Remember(HashEncoder())
    if spec.startswith("ollama:"):
        if embed is None:
            raise EncoderError(f"encoder {spec!r} needs an Ollama server; use --backend ollama or --ollama-url")
        return Remember(RemoteEncoder(spec.removeprefix("ollama:"), embed))
    how = Running(device=device, deterministic=deterministic, micro_batch=micro_batch, max_tokens=max_tokens)
    return Remember(_load(find_weights(spec), how))


def _load(weights: Weights, how: Running) -> Encoder:
    from query_mutator.encoder.bert import BertEncoder, is_plain_bert

    kind = BertEncoder if is_plain_bert(weights.folder) else SentenceTransformerEncoder
    try:
        return kind(weights, how)
    except Exception as error:  # a broken file fails in as many ways as there are readers of it
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise EncoderError(f"encoder {weights.name!r} ({weights.source}) cannot be loaded: {reason[:160]}") from error


class Remember:
    """Keeps the rows of texts seen, the least recently used going first; a text that two callers need is computed once.

    Callers compute different texts side by side; one that needs what another is computing waits for it, after its own.
    """

    def __init__(self, inner: Encoder, *, texts: int = REMEMBERED_TEXTS) -> None:
        self.name, self.dim, self.source, self.fingerprint = inner.name, inner.dim, inner.source, inner.fingerprint
        self._inner = inner
        self._limit = texts
        self._rows: OrderedDict[str, FloatArray] = OrderedDict()
        self._under_way: dict[str, Future[FloatArray]] = {}
        self._memory_lock = threading.Lock()
        #: Hears of new texts and their rows [n, dim] before they are used.
        self.on_learn: Callable[[Sequence[str], FloatArray], None] = lambda texts, rows: None

    @property
    def is_remote(self) -> bool:
        """Return whether a server makes the embeddings."""
        return isinstance(self._inner, RemoteEncoder)

    def __repr__(self) -> str:
        return f"Remember({self._inner!r})"

    def encode(self, texts: Sequence[str]) -> FloatArray:
        """Return one unit row per text, [n, dim]; equal texts are computed once."""
        found, awaited, mine = self._claim(texts)
        if mine:
            found.update(self._learn(mine))
        for text, row in awaited.items():
            found[text] = row.result()
        return np.array([found[text] for text in texts]) if texts else np.empty((0, self.dim), np.float32)

    def recall(self, texts: Sequence[str]) -> FloatArray | None:
        """Return the rows [n, dim] of texts seen before, None when one of them is new."""
        with self._memory_lock:
            if not texts or not all(text in self._rows for text in texts):
                return None
            for text in texts:
                self._rows.move_to_end(text)
            return np.array([self._rows[text] for text in texts])

    def _claim(self, texts: Sequence[str]) -> tuple[dict[str, FloatArray], dict[str, Future[FloatArray]], list[str]]:
        """Return the rows known, those that others are computing, and the texts that the caller now has to compute."""
        found: dict[str, FloatArray] = {}
        awaited: dict[str, Future[FloatArray]] = {}
        mine = []
        with self._memory_lock:
            for text in dict.fromkeys(texts):
                if text in self._rows:
                    self._rows.move_to_end(text)
                    found[text] = self._rows[text]
                elif text in self._under_way:
                    awaited[text] = self._under_way[text]
                else:
                    self._under_way[text] = Future()
                    mine.append(text)
        return found, awaited, mine

    def _learn(self, texts: Sequence[str]) -> dict[str, FloatArray]:
        try:
            rows = self._inner.encode(texts)
            self.on_learn(texts, rows)
            learned = self.remember(texts, rows)
        except BaseException as error:
            for text in texts:
                self._finished(text).set_exception(error)
            raise
        for text, row in learned.items():
            self._finished(text).set_result(row)
        return learned

    def _finished(self, text: str) -> Future[FloatArray]:
        with self._memory_lock:
            return self._under_way.pop(text)

    def remember(self, texts: Sequence[str], rows: FloatArray) -> dict[str, FloatArray]:
        """Take rows [n, dim] computed before with these weights; return them by text."""
        learned = {text: row.copy() for text, row in zip(texts, rows, strict=True)}  # a view would keep its batch alive
        with self._memory_lock:
            self._rows.update(learned)
            while len(self._rows) > self._limit:
                self._rows.popitem(last=False)
        return learned

    def close(self) -> None:
        """Forget the texts and close the encoder inside."""
        with self._memory_lock:
            self._rows.clear()
        self._inner.close()


class HashEncoder:
    """Feature hashing of words and character trigrams: deterministic, instant, no torch, no meaning beyond spelling."""

    def __init__(self, dim: int = HASH_DIM) -> None:
        self.name = "hash"
        self.dim = dim
        self.source = "feature hashing, no weights"
        self.fingerprint = f"hash-{dim}"

    def __repr__(self) -> str:
        return f"HashEncoder(dim={self.dim})"

    def encode(self, texts: Sequence[str]) -> FloatArray:
        """Return one unit row per text, [n, dim]."""
        rows = np.zeros((len(texts), self.dim), np.float32)
        for row, text in zip(rows, texts, strict=True):
            hashes = np.array([zlib.crc32(feature.encode()) for feature in _features(text)], np.uint32)
            signs = np.where(hashes >> np.uint32(31), np.float32(1), np.float32(-1))
            np.add.at(row, hashes % np.uint32(self.dim), signs)
        return _unit(rows)

    def close(self) -> None:
        """Do nothing: there is nothing to give back."""


def _unit(rows: FloatArray) -> FloatArray:
    """Return rows of length one; a row of zeros stays."""
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return (rows / np.where(norms > 0, norms, 1)).astype(np.float32)


def _features(text: str) -> list[str]:
    """Return the words of a text and their character trigrams; the end mark keeps an empty text off the zero vector."""
    features = ["\0"]
    for word in re.findall(r"\w+", text.lower()):
        padded = f"<{word}>"
        features += [word, *(padded[i : i + 3] for i in range(len(padded) - 2))]
    return features


class RemoteEncoder:
    """A model server's embeddings, normalised; `embed(model, texts)` makes the call."""

    def __init__(self, model: str, embed: Embed) -> None:
        self.name = f"ollama:{model}"
        self.source = f"model {model} on the Ollama server"
        self._model = model
        self._embed = embed
        probe = self.encode_rows(["What does this encoder make of a plain sentence?"])
        self.dim = int(probe.shape[1])
        # The server may be given other weights under the same name: what they make of one sentence tells them apart.
        self.fingerprint = hashlib.sha256(f"{model}:{np.round(probe, 3).tolist()}".encode()).hexdigest()

    def __repr__(self) -> str:
        return f"RemoteEncoder({self._model})"

    def encode(self, texts: Sequence[str]) -> FloatArray:
        """Return one unit row per text, [n, dim]."""
        return self.encode_rows(texts) if texts else np.empty((0, self.dim), np.float32)

    def encode_rows(self, texts: Sequence[str]) -> FloatArray:
        """Return one unit row per text of a list that is not empty; " " stands for "", which servers do not embed."""
        rows = np.asarray(self._embed(self._model, [text or " " for text in texts]), np.float32)
        if rows.ndim != 2 or len(rows) != len(texts) or rows.shape[1] == 0:
            raise EncoderError(f"model {self._model!r} gave no embeddings; choose another, such as ollama:all-minilm")
        return _unit(rows)

    def close(self) -> None:
        """Do nothing: the connection belongs to the client."""


class SentenceTransformerEncoder:
    """Any other sentence-transformers folder, run by that library."""

    def __init__(self, weights: Weights, how: Running) -> None:
        self.name, self.source, self.fingerprint = weights.name, weights.source, how.fingerprint(weights)
        self._how = how
        self._model = _quietly_load(weights.folder, device=how.device)
        if how.max_tokens is not None:
            self._model.max_seq_length = min(how.max_tokens, self._model.max_seq_length or how.max_tokens)
        self.dim = int(self._model.get_embedding_dimension())
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"SentenceTransformerEncoder({self.name})"

    def encode(self, texts: Sequence[str]) -> FloatArray:
        """Return one unit row per text, [n, dim]."""
        import torch

        with self._lock:
            if self._how.deterministic and torch.get_num_threads() != 1:  # each calling thread has its own setting
                torch.set_num_threads(1)
            rows = self._model.encode(
                list(texts), batch_size=self._how.rows, normalize_embeddings=True, show_progress_bar=False
            )
        return np.asarray(rows, np.float32)

    def close(self) -> None:
        """Do nothing: the weights go when the encoder does."""


def _quietly_load(folder: Path, *, device: str) -> Any:
    """Load with sentence-transformers, without its bar over the weights."""
    from sentence_transformers import SentenceTransformer
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        return SentenceTransformer(str(folder), device=device, local_files_only=True)
    finally:
        transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


@lru_cache(maxsize=1)
def english_ranks() -> dict[str, int]:
    """Return the whole words of the packaged vocabulary, lower case, by rank (0 is the most frequent).

    Words are plain letters; pieces of words are left out. Without the package this is an EncoderError.
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
