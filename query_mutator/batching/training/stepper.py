"""One optimizer step: sum losses over all tokens, sum gradients over ranks, divide by the number of tokens, update."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed

from query_mutator.batching.training.losses import learned_tokens, to_tensors, token_losses
from query_mutator.batching.training.microbatch import Microbatch
from query_mutator.cli.console import note
from query_mutator.errors import UsageError

__all__ = ["StepResult", "Stepper", "cosine_lr"]

_CPU_MEMORY = ("can't allocate memory", "not enough memory")  # messages of torch's CPU allocator


def cosine_lr(step: int, total_steps: int, *, peak: float, warmup_ratio: float, min_lr_ratio: float) -> float:
    """Return the learning rate of a step, counted from 0: linear warm-up, then a cosine decay."""
    warmup = math.ceil(warmup_ratio * total_steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    lowest = peak * min_lr_ratio
    done = (step - warmup) / max(1, total_steps - warmup)
    return lowest + (peak - lowest) * (1 + math.cos(math.pi * min(1.0, done))) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Figures of a step over all ranks: mean loss of a learned token, learned and padded tokens, gradient norm."""

    loss: float
    loss_tokens: int
    padded_tokens: int
    grad_norm: float


class Stepper:
    """Runs steps of a model. A batch that does not fit into memory is halved, as are all later ones of its size."""

    def __init__(
        self, model: Any, *, pad_id: int, device: torch.device, bf16: bool, attention: str, max_grad_norm: float
    ) -> None:
        self.model = model
        self.parameters = [one for one in model.parameters() if one.requires_grad]
        self.max_tokens: int | None = None  # of a batch, once one did not fit
        self._pad_id, self._device, self._bf16 = pad_id, device, bf16
        self._attention, self._max_grad_norm = attention, max_grad_norm

    def step(self, microbatches: Sequence[Microbatch], optimizer: torch.optim.Optimizer) -> StepResult:
        """Take one step on the mean loss of all learned tokens of all ranks."""
        self.model.train()
        # 1. Sum the gradients of this rank's tokens, then those of all ranks.
        loss, tokens = self._accumulate(microbatches)
        self._sum_gradients()
        padded = sum(one.padded_tokens for one in microbatches)
        loss, tokens, padded_sum = self._summed((loss, tokens, padded))
        # 2. Divide by the tokens of all ranks, clip, update.
        norm = 0.0
        if tokens:
            for parameter in self.parameters:
                if parameter.grad is not None:
                    parameter.grad.div_(tokens)
            norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, self._max_grad_norm or math.inf))
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return StepResult(
            loss=loss / max(tokens, 1), loss_tokens=int(tokens), padded_tokens=int(padded_sum), grad_norm=norm
        )

    def mean_loss(self, microbatches: Sequence[Microbatch]) -> float:
        """Return the mean loss of a learned token over the microbatches of all ranks, without learning."""
        self.model.eval()
        total, tokens = 0.0, 0
        with torch.no_grad(), self._precision():
            for piece in self._pieces(microbatches):
                tensors = self._tensors(piece)
                total += float(token_losses(self.model, tensors).sum())
                tokens += learned_tokens(tensors)
        total, count = self._summed((total, tokens))
        return total / max(count, 1.0)

    def _accumulate(self, microbatches: Sequence[Microbatch]) -> tuple[float, float]:
        """Leave the summed gradient of this rank's microbatches; return summed loss and number of learned tokens.

        A batch that ran out of memory may have left half a gradient, so all of them run again.
        """
        while True:
            for parameter in self.parameters:
                parameter.grad = None
            loss, tokens, failed = 0.0, 0, None
            for piece in self._pieces(microbatches):
                found = self._backward(piece)
                if found is None:
                    failed = piece
                    break
                loss, tokens = loss + found[0], tokens + found[1]
            if failed is None:
                return loss, float(tokens)
            self._halve_from_now_on(failed)

    def _backward(self, piece: Microbatch) -> tuple[float, int] | None:
        """Add one piece's gradient; return its summed loss and learned tokens, or None if memory ran out."""
        try:
            tensors = self._tensors(piece)
            tokens = learned_tokens(tensors)
            if tokens == 0 or piece.spec.is_padding:
                return 0.0, 0
            with self._precision():
                loss = token_losses(self.model, tensors).sum()
            loss.backward()  # type: ignore[no-untyped-call]
            return float(loss.detach()), tokens
        except (torch.OutOfMemoryError, MemoryError):
            return None
        except RuntimeError as error:
            if any(words in str(error) for words in _CPU_MEMORY):
                return None
            raise

    def _halve_from_now_on(self, piece: Microbatch) -> None:
        if piece.halves() is None:
            raise UsageError(
                f"a single sample of {piece.padded_tokens} tokens does not fit into memory; try a smaller "
                "--max-length, --gradient-checkpointing, --use-lora or --dtype bfloat16"
            )
        if self.max_tokens is None:
            note(
                f"out of memory with {piece.spec.num_rows} rows of {piece.spec.max_len} tokens: such batches are "
                "halved from now on; steps stay the same"
            )
        self.max_tokens = piece.padded_tokens // 2
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _pieces(self, microbatches: Sequence[Microbatch]) -> Iterator[Microbatch]:
        """Yield the microbatches, those over the limit in halves, quarters and so on."""
        waiting = list(reversed(microbatches))
        while waiting:
            one = waiting.pop()
            halves = one.halves() if self.max_tokens is not None and one.padded_tokens > self.max_tokens else None
            if halves is None:
                yield one
            else:
                waiting += reversed(halves)

    def _tensors(self, piece: Microbatch) -> dict[str, Any]:
        return to_tensors(piece.collated(self._pad_id), self._device, attention=self._attention)

    def _precision(self) -> torch.autocast:
        return torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=self._bf16)

    def _sum_gradients(self) -> None:
        """Add the gradients of all ranks, in place; a rank without any adds zeros."""
        if not distributed.is_initialized():
            return
        pending = []
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            pending.append(distributed.all_reduce(parameter.grad, async_op=True))
        for one in pending:
            one.wait()

    def _summed(self, numbers: Iterable[float]) -> list[float]:
        """Return the sums of these numbers over all ranks."""
        values = torch.tensor(list(numbers), dtype=torch.float64, device=self._device)
        if distributed.is_initialized():
            distributed.all_reduce(values)
        return [float(value) for value in values.tolist()]
