"""One optimiser step: losses summed over everything in it, gradients shared, divided by the tokens, applied."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from query_mutator.cli.console import note
from query_mutator.errors import UsageError
from query_mutator.sft.losses import learned_tokens, to_tensors, token_losses
from query_mutator.sft.microbatch import Microbatch
from query_mutator.sft.ranks import sum_gradients, summed

_CPU_MEMORY = ("can't allocate memory", "not enough memory")  # what torch's CPU allocator says


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step was worth, over all ranks: mean loss of a learned token, learned and padded tokens, gradient norm."""

    loss: float
    loss_tokens: int
    padded_tokens: int
    grad_norm: float


class Stepper:
    """Runs steps of a model. A batch that does not fit into memory is cut in two, from then on, and said once."""

    def __init__(
        self, model: Any, *, pad_id: int, device: torch.device, bf16: bool, attention: str, max_grad_norm: float
    ) -> None:
        self.model = model
        self.parameters = [one for one in model.parameters() if one.requires_grad]
        self.max_tokens: int | None = None  # of a batch, once one did not fit
        self._pad_id = pad_id
        self._device = device
        self._bf16 = bf16
        self._attention = attention
        self._max_grad_norm = max_grad_norm

    def step(self, microbatches: Sequence[Microbatch], optimizer: torch.optim.Optimizer) -> StepResult:
        """Take one step on the mean loss of all learned tokens of all ranks."""
        self.model.train()
        loss, tokens = self._accumulated(microbatches)
        sum_gradients(self.parameters)
        mine = (loss, tokens, float(sum(one.padded_tokens for one in microbatches)))
        loss, tokens, padded = summed(mine, self._device)
        norm = 0.0
        if tokens:
            for parameter in self.parameters:
                if parameter.grad is not None:
                    parameter.grad.div_(tokens)
            limit = self._max_grad_norm or float("inf")
            norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, limit))
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return StepResult(
            loss=loss / max(tokens, 1), loss_tokens=int(tokens), padded_tokens=int(padded), grad_norm=norm
        )

    def _accumulated(self, microbatches: Sequence[Microbatch]) -> tuple[float, float]:
        """Leave the summed gradient of this rank's microbatches; return summed loss and number of learned tokens.

        A batch that ran out of memory may have left half a gradient, so all of them are run again.
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
            self._cut_from_now_on(failed)

    def _backward(self, piece: Microbatch) -> tuple[float, int] | None:
        """Add one piece's gradient; return its summed loss and learned tokens, or None when memory ran out."""
        try:
            tensors = to_tensors(piece.collated(self._pad_id), self._device, attention=self._attention)
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

    def _cut_from_now_on(self, piece: Microbatch) -> None:
        if piece.halves() is None:
            raise UsageError(
                f"a single sample of {piece.padded_tokens} tokens does not fit into memory; try a smaller "
                "--max-length, --gradient-checkpointing, --use-lora or --dtype bfloat16"
            )
        if self.max_tokens is None:
            note(
                f"out of memory with {piece.spec.num_rows} rows of {piece.spec.max_len} tokens: such batches are cut "
                "in two from now on; steps stay the same"
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

    def mean_loss(self, microbatches: Sequence[Microbatch]) -> float:
        """Return the mean loss of a learned token over the microbatches of all ranks, without learning."""
        self.model.eval()
        total, tokens = 0.0, 0
        with torch.no_grad(), self._precision():
            for piece in self._pieces(microbatches):
                tensors = to_tensors(piece.collated(self._pad_id), self._device, attention=self._attention)
                total += float(token_losses(self.model, tensors).sum())
                tokens += learned_tokens(tensors)
        total, count = summed((total, tokens), self._device)
        return total / max(count, 1.0)

    def _precision(self) -> torch.autocast:
        return torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=self._bf16)
