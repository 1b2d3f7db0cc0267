"""Losses token by token, and the masks that keep packed samples apart.

R rows, L tokens a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional

from query_mutator.batching.generation.collate import CollatedBatch
from query_mutator.batching.planning.packing import IGNORE_LABEL
from query_mutator.batching.torch_data import flex_block_mask, sdpa_block_mask
from query_mutator.errors import UsageError

MASKS = ("sdpa", "eager", "flex_attention")  # kinds of attention that packs are kept apart in


def to_tensors(batch: CollatedBatch, device: torch.device, *, attention: str = "sdpa") -> dict[str, Any]:
    """Return `input_ids`, `labels`, `position_ids` int64 [R, L] and the mask for a model's kind of attention.

    Without packs the mask is [R, L]; packs get one that is block-diagonal and causal, [R, 1, L, L] or a BlockMask.
    """
    tensors: dict[str, Any] = {
        name: torch.from_numpy(batch[name]).to(device, torch.int64) for name in ("input_ids", "labels", "position_ids")
    }
    if batch.segment_ids is None:
        tensors["attention_mask"] = torch.from_numpy(batch.attention_mask).to(device, torch.int64)
        return tensors
    segments = torch.from_numpy(batch.segment_ids).to(device, torch.int64)
    if attention == "flex_attention":
        tensors["attention_mask"] = flex_block_mask(segments)
    elif attention in MASKS:
        mask = sdpa_block_mask(segments)
        tensors["attention_mask"] = mask if attention == "sdpa" else _additive(mask)
    else:
        raise UsageError(f"packed rows cannot be kept apart in attention {attention!r}; use {' or '.join(MASKS)}")
    return tensors


def _additive(mask: torch.Tensor) -> torch.Tensor:
    """Return 0 where the mask is True and the lowest float elsewhere."""
    lowest = torch.finfo(torch.float32).min
    return torch.where(mask, 0.0, lowest).to(torch.float32)


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
    """Return how many tokens have a loss."""
    return int((tensors["labels"][:, 1:] != IGNORE_LABEL).sum())
