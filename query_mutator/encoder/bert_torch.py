"""The forward pass of a BERT sentence encoder with torch.

B texts, T tokens in all, S in the longest text, H hidden size, A attention heads
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from query_mutator.encoder.bert import CPU_TOKENS, Bert, cores
from query_mutator.encoder.weights import EncoderSettings, Weights
from query_mutator.types import FloatArray


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Where the tokens of B texts are: concatenated [T] for matrix products, padded [B, S] for attention only."""

    text_ids: torch.Tensor  # [T], index of a token's text
    positions: torch.Tensor  # [T], position of a token in its text
    lengths: torch.Tensor  # [B]
    longest: int
    mask: torch.Tensor | None  # [B, 1, 1, S], True for tokens; None if all texts have the same length

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> PackedBatch:
        """Return the layout of texts of these lengths in tokens."""
        count, longest = torch.tensor(lengths, device=device), max(lengths)
        text_ids = torch.repeat_interleave(torch.arange(len(lengths), device=device), count)
        positions = torch.cat([torch.arange(length, device=device) for length in lengths])
        is_token = torch.arange(longest, device=device) < count[:, None]
        mask = None if min(lengths) == longest else is_token[:, None, None, :]
        return cls(text_ids, positions, count, longest, mask)

    def pad(self, packed: torch.Tensor) -> torch.Tensor:
        """Return [T, K] as [B, S, K], padded with zeros."""
        if self.mask is None:
            return packed.view(len(self.lengths), self.longest, -1)
        padded = packed.new_zeros(len(self.lengths), self.longest, packed.shape[-1])
        padded[self.text_ids, self.positions] = packed
        return padded

    def pack(self, padded: torch.Tensor) -> torch.Tensor:
        """Return [B, S, K] as [T, K]."""
        return padded.flatten(0, 1) if self.mask is None else padded[self.text_ids, self.positions]


class BertEncoder(Bert):
    """Runs the forward pass with torch, on any device.

    `deterministic` runs one row at a time on one torch thread, so a text's row never depends on its neighbors.
    """

    def __init__(self, weights: Weights, settings: EncoderSettings) -> None:
        self._device = torch.device(settings.device)
        on_cpu = self._device.type == "cpu"
        # On a CPU one pass keeps one core busy; on a GPU one pass keeps all of it busy.
        super().__init__(
            weights,
            settings,
            tokens_per_pass=CPU_TOKENS if on_cpu else 128 * CPU_TOKENS,
            passes=cores() if on_cpu else 1,
        )
        tensors = load_file(str(weights.folder / "model.safetensors"))
        named = {
            name: tensor.to(self._device, torch.float32)
            for name, tensor in tensors.items()
            if tensor.is_floating_point()
        }
        self._arrange(named, join=torch.cat)

    def _use_one_thread(self) -> None:
        torch.set_num_threads(1)  # a setting of each calling thread

    def _pooled(self, tokens: Sequence[Sequence[int]]) -> FloatArray:
        if self._settings.deterministic and torch.get_num_threads() != 1:
            self._use_one_thread()
        with torch.inference_mode():
            batch = PackedBatch.of([len(row) for row in tokens], self._device)
            ids = torch.tensor([token for row in tokens for token in row], device=self._device)  # [T]
            hidden = self._forward(ids, batch)
            total = torch.zeros(len(tokens), self.dim, device=self._device).index_add_(0, batch.text_ids, hidden)
            rows: FloatArray = F.normalize(total / batch.lengths[:, None], dim=1).cpu().numpy()
            return rows

    def _forward(self, ids: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
        """Return the last hidden states [T, H] of token ids [T] (Devlin et al. 2019, post-layer-norm)."""
        shape, eps = (self.dim,), self._eps
        x = F.embedding(ids, self._words) + self._positions[batch.positions]
        x = F.layer_norm(x, shape, *self._norm, eps=eps)
        for layer in self._layers:
            # Self-attention over each text, on the padded layout.
            qkv = batch.pad(F.linear(x, *layer["qkv"]))  # [B, S, 3H]
            split = qkv.view(*qkv.shape[:2], 3, self._heads, -1)  # [B, S, 3, A, H/A]
            query, key, value = split.permute(2, 0, 3, 1, 4)  # each [B, A, S, H/A]
            attended = F.scaled_dot_product_attention(query, key, value, attn_mask=batch.mask)
            attended = batch.pack(attended.transpose(1, 2).flatten(2))  # [T, H]
            attended = F.linear(attended, *layer["attention.output.dense"])
            x = F.layer_norm(x + attended, shape, *layer["attention.output.LayerNorm"], eps=eps)
            # Feed-forward network, on the packed layout.
            wide = F.gelu(F.linear(x, *layer["intermediate.dense"]))
            x = F.layer_norm(x + F.linear(wide, *layer["output.dense"]), shape, *layer["output.LayerNorm"], eps=eps)
        return x
