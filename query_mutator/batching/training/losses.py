"""Losses of single tokens, and the masks that separate packed samples.

R rows, L tokens of a row
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional

from query_mutator.batching.generation.collate import CollatedBatch
from query_mutator.batching.planning.layout import IGNORE_LABEL
from query_mutator.batching.torch_data import flex_block_mask, sdpa_block_mask
from query_mutator.errors import UsageError

__all__ = ["learned_tokens", "to_tensors", "token_losses"]


def to_tensors(batch: CollatedBatch, device: torch.device, *, attention: str = "sdpa") -> dict[str, Any]:
    """Return `input_ids`, `labels`, `position_ids` int64 [R, L] and the mask for a model's kind of attention.

    Without packs the mask is [R, L]; packs get a block-diagonal causal one, [R, 1, L, L] or a BlockMask.
    """

    def tensor(values: Any) -> torch.Tensor:
        return torch.from_numpy(values).to(device, torch.int64)

    tensors: dict[str, Any] = {name: tensor(batch[name]) for name in ("input_ids", "labels", "position_ids")}
    tensors["attention_mask"] = tensor(batch.attention_mask)
    if batch.segment_ids is not None:
        tensors["attention_mask"] = _block_mask(tensor(batch.segment_ids), attention)
    return tensors


def _block_mask(segments: torch.Tensor, attention: str) -> Any:
    if attention == "flex_attention":
        return flex_block_mask(segments)
    if attention == "sdpa":
        return sdpa_block_mask(segments)
    if attention == "eager":  # takes a mask to add: 0, or the lowest float
        return torch.where(sdpa_block_mask(segments), 0.0, torch.finfo(torch.float32).min).to(torch.float32)
    raise UsageError(f"packed rows cannot be kept apart in attention {attention!r}; use sdpa, eager or flex_attention")


def token_losses(model: Any, tensors: Mapping[str, Any]) -> torch.Tensor:
    """Return the loss of every predicted token, float32 [R, L-1]; 0 where the label is not learned."""
    inputs = {name: tensors[name] for name in ("input_ids", "attention_mask", "position_ids")}
    logits = model(**inputs, use_cache=False).logits[:, :-1]
    labels = tensors["labels"][:, 1:]
    losses = functional.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORE_LABEL, reduction="none"
    )
    return losses.view(labels.shape)


def learned_tokens(tensors: Mapping[str, Any]) -> int:
    """Return the number of tokens that have a loss."""
    return int((tensors["labels"][:, 1:] != IGNORE_LABEL).sum())
