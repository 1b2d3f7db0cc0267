"""BERT sentence encoders run directly: what the forward passes of `bert_torch` and `bert_numpy` share.

Both equal `SentenceTransformer.encode` to 1e-5 and start much faster, because they import neither `transformers` nor
`sentence_transformers` (docs/log.md has the figures). `bert_numpy` starts fastest, as it does not import torch either.

B texts, H hidden size
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from query_mutator.encoder.base import readable
from query_mutator.encoder.weights import EncoderSettings, Weights
from query_mutator.types import FloatArray

#: Tokens in one forward pass on a CPU; beyond it the activations leave the cache and a text takes longer.
CPU_TOKENS = 512
FEW_PASSES = 4  # one after the other: starting threads would take longer
#: Parts of a layer, as the weights' file names them.
LINEAR = ("attention.output.dense", "intermediate.dense", "output.dense")
NORMS = ("attention.output.LayerNorm", "output.LayerNorm")


def is_plain_bert(folder: Path) -> bool:
    """Return whether a folder holds BERT with mean pooling and optional normalization, which this module can run."""
    try:
        config = read_json(folder / "config.json")
        modules = [str(module["type"]).rpartition(".")[2] for module in read_json(folder / "modules.json")]
        pooling = read_json(folder / "1_Pooling" / "config.json")
    except (OSError, ValueError, KeyError, TypeError):
        return False
    modes = {key for key, value in pooling.items() if key.startswith("pooling_mode_") and value}
    return (
        config.get("model_type") == "bert"
        and config.get("hidden_act") == "gelu"
        and config.get("position_embedding_type", "absolute") == "absolute"
        and modules[:2] == ["Transformer", "Pooling"]
        and modules[2:] in ([], ["Normalize"])
        and modes == {"pooling_mode_mean_tokens"}
        and (folder / "tokenizer.json").is_file()
    )


class Bert:
    """Encodes texts with the weights of a folder for which `is_plain_bert` holds; thread-safe.

    A subclass loads the weights and implements `_pooled`. At most `passes` forward passes run at a time.
    """

    def __init__(self, weights: Weights, settings: EncoderSettings, *, tokens_per_pass: int, passes: int) -> None:
        config = read_json(weights.folder / "config.json")
        self.name, self.source, self.fingerprint = weights.name, weights.source, settings.fingerprint(weights)
        self.dim = int(config["hidden_size"])
        self._heads = int(config["num_attention_heads"])
        self._num_layers = int(config["num_hidden_layers"])
        self._eps = float(config["layer_norm_eps"])
        self._settings = settings
        self._tokens_per_pass, self._most_passes = tokens_per_pass, passes
        self._passes: AbstractContextManager[Any] = threading.BoundedSemaphore(passes)
        self._tokenizer = Tokenizer.from_file(str(weights.folder / "tokenizer.json"))
        self._tokenizer.no_padding()
        longest = _max_tokens(weights.folder, config)
        self._tokenizer.enable_truncation(min(longest, settings.max_tokens or longest))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name}, {self._settings.device})"

    def encode(self, texts: Sequence[str]) -> FloatArray:
        """Return one unit row per text: float32 [n, dim]; longer texts are truncated to the model's limit."""
        rows = np.empty((len(texts), self.dim), np.float32)
        # One by one: no tokenizer threads to fork over.
        tokens = [self._tokenizer.encode(text).ids for text in readable(texts)]

        def encode(batch: list[int]) -> None:
            with self._passes:
                rows[batch] = self._pooled([tokens[i] for i in batch])

        batches = list(self._micro_batches(tokens))
        if len(batches) <= FEW_PASSES:
            for batch in batches:
                encode(batch)
        else:
            with ThreadPoolExecutor(self._most_passes, initializer=self._use_one_thread) as pool:
                list(pool.map(encode, batches))
        return rows

    def close(self) -> None:
        """Do nothing; the weights are freed with the encoder."""

    def _use_one_thread(self) -> None:
        """Keep the passes of the calling thread on one core."""

    def _pooled(self, tokens: Sequence[Sequence[int]]) -> FloatArray:
        """Return the mean of the last hidden states over each text's tokens, normalized: [B, H]."""
        raise NotImplementedError

    def _arrange(self, tensors: Mapping[str, Any], *, join: Callable[[list[Any]], Any]) -> None:
        """Arrange the file's tensors for the forward pass; `join` makes query, key and value one matrix."""
        named = {name.removeprefix("bert."): tensor for name, tensor in tensors.items()}

        def pair(name: str) -> tuple[Any, Any]:
            return named[f"{name}.weight"], named[f"{name}.bias"]

        self._words = named["embeddings.word_embeddings.weight"]
        token_type = named["embeddings.token_type_embeddings.weight"][0]  # every text is a single segment
        self._positions = named["embeddings.position_embeddings.weight"] + token_type
        self._norm = pair("embeddings.LayerNorm")
        self._layers = []
        for number in range(self._num_layers):
            prefix = f"encoder.layer.{number}."
            qkv = [pair(f"{prefix}attention.self.{part}") for part in ("query", "key", "value")]
            layer = {name: pair(prefix + name) for name in (*LINEAR, *NORMS)}
            layer["qkv"] = (join([weight for weight, _ in qkv]), join([bias for _, bias in qkv]))
            self._layers.append(layer)

    def _micro_batches(self, tokens: Sequence[Sequence[int]]) -> Iterator[list[int]]:
        """Yield indices in groups of similar length, longest first, within the rows and tokens of one pass."""
        order = sorted(range(len(tokens)), key=lambda i: -len(tokens[i]))
        start = 0
        while start < len(order):
            rows = min(self._settings.rows, max(1, self._tokens_per_pass // len(tokens[order[start]])))
            yield order[start : start + rows]
            start += rows


def _max_tokens(folder: Path, config: dict[str, Any]) -> int:
    """Return the sentence encoder's own token limit, at most BERT's number of position embeddings."""
    limit = int(config["max_position_embeddings"])
    try:
        return min(limit, int(read_json(folder / "sentence_bert_config.json")["max_seq_length"]))
    except (OSError, ValueError, KeyError, TypeError):
        return limit


def cores() -> int:
    """Return the number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
