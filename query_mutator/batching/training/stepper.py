"""One optimizer step: sum the losses of all tokens, divide the gradient by their number, update.

R rows, L tokens of a row
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from query_mutator.batching.generation.io import CollatedBatch
from query_mutator.batching.planning.packing import IGNORE_LABEL, PADDING_SEGMENT
from query_mutator.batching.training.sources import Microbatch
from query_mutator.errors import UsageError

__all__ = ["StepResult", "Stepper", "cosine_lr", "learned_tokens", "sdpa_block_mask", "to_tensors", "token_losses"]

_CPU_MEMORY = ("can't allocate memory", "not enough memory")  # messages of torch's CPU allocator


def cosine_lr(step: int, total_steps: int, *, peak: float, warmup_ratio: float) -> float:
    """Return the learning rate of a step, counted from 0: linear warm-up, then a cosine decay to 0."""
    warmup = math.ceil(warmup_ratio * total_steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, total_steps - warmup)
    return peak * (1 + math.cos(math.pi * min(1.0, done))) / 2


def sdpa_block_mask(segment_ids: torch.Tensor) -> torch.Tensor:
    """Return bool [R, 1, L, L] for scaled_dot_product_attention: True where a token may attend.

    Tokens attend to their own segment, not to later ones. A padding token attends to itself, because a row without any
    True gives NaN.
    """
    mask = (segment_ids[:, :, None] == segment_ids[:, None, :]) & (segment_ids != PADDING_SEGMENT)[:, :, None]
    length = segment_ids.shape[1]
    mask &= torch.ones(length, length, dtype=torch.bool, device=segment_ids.device).tril()
    mask |= torch.eye(length, dtype=torch.bool, device=segment_ids.device)
    return mask[:, None]


def to_tensors(batch: CollatedBatch, device: torch.device) -> dict[str, torch.Tensor]:
    """Return `input_ids`, `labels`, `position_ids` int64 [R, L] and the attention mask.

    Without packs the mask is [R, L]; packs get a block-diagonal causal one, [R, 1, L, L].
    """
    names = ("input_ids", "labels", "position_ids", "attention_mask")
    tensors = {name: torch.from_numpy(batch[name]).to(device, torch.int64) for name in names}
    if batch.segment_ids is not None:
        tensors["attention_mask"] = sdpa_block_mask(torch.from_numpy(batch.segment_ids).to(device))
    return tensors


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


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Figures of a step: mean loss of a learned token, learned and padded tokens, gradient norm."""

    loss: float
    loss_tokens: int
    padded_tokens: int
    grad_norm: float


class Stepper:
    """Runs steps of a model."""

    def __init__(self, model: Any, *, pad_id: int, device: torch.device, bf16: bool, max_grad_norm: float) -> None:
        self.model = model
        self.parameters = [one for one in model.parameters() if one.requires_grad]
        self._pad_id, self._device, self._bf16 = pad_id, device, bf16
        self._max_grad_norm = max_grad_norm

    def step(self, microbatches: Sequence[Microbatch], optimizer: torch.optim.Optimizer) -> StepResult:
        """Take one step on the mean loss of all learned tokens."""
        self.model.train()
        # 1. Sum the gradients of all tokens.
        loss, tokens = 0.0, 0
        for one in microbatches:
            found = self._backward(one)
            loss, tokens = loss + found[0], tokens + found[1]
        # 2. Divide by the tokens, clip, update.
        norm = 0.0
        if tokens:
            for parameter in self.parameters:
                if parameter.grad is not None:
                    parameter.grad.div_(tokens)
            norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, self._max_grad_norm or math.inf))
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return StepResult(
            loss=loss / max(tokens, 1),
            loss_tokens=tokens,
            padded_tokens=sum(one.padded_tokens for one in microbatches),
            grad_norm=norm,
        )

    def mean_loss(self, microbatches: Sequence[Microbatch]) -> float:
        """Return the mean loss of a learned token, without learning."""
        self.model.eval()
        total, tokens = 0.0, 0
        with torch.no_grad(), self._precision():
            for one in microbatches:
                tensors = self._tensors(one)
                total += float(token_losses(self.model, tensors).sum())
                tokens += learned_tokens(tensors)
        return total / max(tokens, 1)

    def _backward(self, microbatch: Microbatch) -> tuple[float, int]:
        """Add one microbatch's gradient; return its summed loss and learned tokens."""
        try:
            tensors = self._tensors(microbatch)
            tokens = learned_tokens(tensors)
            if tokens == 0 or microbatch.spec.is_padding:
                return 0.0, 0
            with self._precision():
                loss = token_losses(self.model, tensors).sum()
            loss.backward()  # type: ignore[no-untyped-call]
            return float(loss.detach()), tokens
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
            if type(error) is RuntimeError and not any(words in str(error) for words in _CPU_MEMORY):
                raise
        rows, length = microbatch.spec.num_rows, microbatch.spec.max_len
        raise UsageError(
            f"a batch of {rows} rows of {length} tokens does not fit into memory; resume with a smaller --batch-size "
            "or --token-budget and a larger --gradient-accumulation, or try --gradient-checkpointing, --use-lora or "
            "--dtype bfloat16"
        )

    def _tensors(self, microbatch: Microbatch) -> dict[str, torch.Tensor]:
        return to_tensors(microbatch.collated(self._pad_id), self._device)

    def _precision(self) -> torch.autocast:
        return torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=self._bf16)
