"""The forward pass of a BERT sentence encoder with numpy: a program that only encodes a few texts loads no torch.

B texts, T tokens in all, L in one text, H hidden size, A attention heads
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from query_mutator.encoder.base import unit_rows
from query_mutator.encoder.bert import CPU_TOKENS, Bert, cores
from query_mutator.encoder.weights import EncoderSettings, Weights
from query_mutator.types import FloatArray

_Pair = tuple[FloatArray, FloatArray]  # weight [out, in] and bias, or scale and shift


class NumpyBert(Bert):
    """Runs the forward pass with numpy, on a CPU; its rows equal those of torch to 1e-5."""

    def __init__(self, weights: Weights, settings: EncoderSettings) -> None:
        super().__init__(weights, settings, tokens_per_pass=CPU_TOKENS, passes=cores())
        tensors = load_file(str(weights.folder / "model.safetensors"))
        named = {
            name: tensor.astype(np.float32, copy=False) for name, tensor in tensors.items() if tensor.dtype.kind == "f"
        }
        self._arrange(named, join=np.concatenate)

    def _pooled(self, tokens: Sequence[Sequence[int]]) -> FloatArray:
        lengths = [len(row) for row in tokens]
        ends = np.cumsum([0, *lengths])
        ids = np.concatenate([np.asarray(row) for row in tokens])  # [T]
        positions = np.concatenate([np.arange(length) for length in lengths])  # [T]
        hidden = self._forward(ids, positions, ends)
        return unit_rows(np.add.reduceat(hidden, ends[:-1], axis=0))  # the mean has the direction of the sum

    def _forward(self, ids: NDArray[Any], positions: NDArray[Any], ends: NDArray[Any]) -> FloatArray:
        """Return the last hidden states [T, H] of token ids [T] (Devlin et al. 2019, post-layer-norm)."""
        x = _normalized(self._words[ids] + self._positions[positions], self._norm, self._eps)
        for layer in self._layers:
            # Self-attention over each text.
            qkv = _linear(x, layer["qkv"])  # [T, 3H]
            attended = np.concatenate([self._attended(qkv[start:stop]) for start, stop in pairwise(ends)])
            attended = _linear(attended, layer["attention.output.dense"])
            x = _normalized(x + attended, layer["attention.output.LayerNorm"], self._eps)
            # Feed-forward network.
            wide = _gelu(_linear(x, layer["intermediate.dense"]))
            x = _normalized(x + _linear(wide, layer["output.dense"]), layer["output.LayerNorm"], self._eps)
        return x

    def _attended(self, qkv: FloatArray) -> FloatArray:
        """Return the attention's output [L, H] for query, key and value [L, 3H] of one text."""
        split = qkv.reshape(len(qkv), 3, self._heads, -1)  # [L, 3, A, H/A]
        query, key, value = split.transpose(1, 2, 0, 3)  # each [A, L, H/A]
        scores = query @ key.transpose(0, 2, 1) / np.float32(np.sqrt(query.shape[-1]))  # [A, L, L]
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        mixed = (scores / scores.sum(axis=-1, keepdims=True)) @ value  # [A, L, H/A]
        attended: FloatArray = mixed.transpose(1, 0, 2).reshape(len(qkv), self.dim)
        return attended


def _linear(rows: FloatArray, pair: _Pair) -> FloatArray:
    result: FloatArray = rows @ pair[0].T
    result += pair[1]
    return result


def _normalized(rows: FloatArray, pair: _Pair, eps: float) -> FloatArray:
    """Return layer normalization over the last dimension."""
    centered = rows - rows.mean(axis=-1, keepdims=True)
    variance = np.square(centered).mean(axis=-1, keepdims=True)
    return np.asarray(centered / np.sqrt(variance + np.float32(eps)) * pair[0] + pair[1], dtype=np.float32)


def _gelu(rows: FloatArray) -> FloatArray:
    """Return x times the normal distribution function at x; its error function is accurate to 6e-7 in float32.

    Abramowitz and Stegun (1964), formula 7.1.26; scipy's takes twice the time, and 0.2 s to import.
    """
    size = np.abs(rows) * np.float32(np.sqrt(0.5))
    t = 1 / (1 + np.float32(0.3275911) * size)
    polynomial = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t
    tail = polynomial * np.exp(-size * size)  # 1 - erf(size)
    return np.asarray(np.where(rows > 0, rows * (1 - tail / 2), rows * tail / 2), dtype=np.float32)
