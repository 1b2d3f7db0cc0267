"""Estimate the peak memory of a training step, how it grows with the batch, and the largest batch that fits.

    B samples in a (micro) batch

A step is forward, backward, clipping and optimizer. Two whole steps are tracked, because the first creates the
optimizer's state. The peak is in the optimizer's temporaries for small batches and in the activations for large ones:
peak(B) = max(floor, base + slope B).
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from query_mutator.errors import UsageError, reason_of
from query_mutator.lab.sizing.cuda import CudaFullPrecision, reserved_peak
from query_mutator.lab.sizing.sizes import Fit, Recipe, Workload
from query_mutator.lab.sizing.tracker import (
    BLOCK_BYTES,
    GUESSES,
    Ledger,
    StorageTracker,
    onednn,
)

__all__ = ["MemoryEstimate", "Trainer", "estimate", "fit", "largest_batch"]

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "sgd-momentum": functools.partial(torch.optim.SGD, momentum=0.9),
    "adafactor": torch.optim.Adafactor,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes of a training step at one batch size; the peak is a range from `low` where scratch is not known exactly."""

    batch: int
    peak: int
    low: int
    data_dependent: bool  # the peak depends on values of tensors, so that it is only an example
    reserved: int  # what CUDA's caching allocator would hold, simulated
    phases: dict[str, int]
    parameters: int
    buffers: int
    gradients: int
    optimizer: int

    @property
    def activations(self) -> int:
        """Return the rest of the peak: activations, inputs and temporaries."""
        return max(0, self.peak - self.parameters - self.buffers - self.gradients - self.optimizer)


def estimate(
    workload: Workload, batch: int, recipe: Recipe | None = None, *, rounding: int = BLOCK_BYTES
) -> MemoryEstimate:
    """Return the memory of a training step without allocating it; UsageError if the model's code needs real data."""
    recipe = recipe or Recipe()
    ledger, sizes, guessed = _track(workload, batch, recipe, rounding)
    return MemoryEstimate(
        batch=batch,
        peak=max(ledger.peaks.values()),
        low=max(ledger.lows.values()),
        data_dependent=guessed and _depends_on_data(workload, batch, recipe),
        reserved=reserved_peak(ledger.trace),
        phases=ledger.peaks,
        **sizes,
    )


def _track(
    workload: Workload, batch: int, recipe: Recipe, rounding: int, *, guess: int = 0
) -> tuple[Ledger, dict[str, int], bool]:
    """Track two steps; return the ledger, the sizes of what remains, and whether .item() was guessed.

    `guess` chooses what .item() returns. UsageError if the model's code needs real data.
    """
    on_cpu = recipe.device == "cpu"
    ledger, fake = Ledger(rounding=rounding), FakeTensorMode(allow_non_fake_inputs=True)
    tracker = StorageTracker(ledger, fake, on_cpu=on_cpu, guess=guess)
    of_cpu = onednn(on_cpu and bool(torch.backends.mkldnn.enabled))  # a GPU has other layers
    with warnings.catch_warnings(action="ignore"), of_cpu, fake, tracker:
        trainer = Trainer(workload, recipe, batch, phase=tracker.phase)
        try:
            trainer.step(micro_batches=1)  # creates the optimizer's state
            trainer.step(micro_batches=min(recipe.accumulate, 2))  # further micro-batches add nothing
        except RuntimeError as error:
            raise UsageError(
                f"{workload.name} cannot be sized: a step on tensors without data fails ({reason_of(error)}); if its "
                "sizes depend on data, only real steps show them"
            ) from error
        for peaks in (ledger.peaks, ledger.lows):
            peaks.pop("build", None)
        # a copy: the ledger also notes what is freed after the step
        return replace(ledger, trace=list(ledger.trace)), trainer.sizes(), tracker.guessed


def _depends_on_data(workload: Workload, batch: int, recipe: Recipe) -> bool:
    """Return whether other guesses of what .item() returns change what is allocated, as branches do."""
    try:
        ledgers = [_track(workload, batch, recipe, 1, guess=guess)[0] for guess in range(len(GUESSES))]
    except UsageError:
        return True
    sizes = [[size for _, size in ledger.trace] for ledger in ledgers]
    return any(one != sizes[0] for one in sizes)


def fit(workload: Workload, recipe: Recipe | None = None, *, batches: tuple[int, int] = (16, 32)) -> Fit:
    """Return how the peak grows with the batch, from two estimates and the optimizer's own peak."""
    small, large = (estimate(workload, batch, recipe) for batch in batches)
    low, high = (max(found.phases["forward"], found.phases["backward"]) for found in (small, large))
    slope = (high - low) / (batches[1] - batches[0])
    floor = max(peak for name, peak in small.phases.items() if name not in ("forward", "backward"))
    return Fit(floor=floor, base=low - slope * batches[0], slope=slope)


def largest_batch(workload: Workload, room: float, recipe: Recipe | None = None) -> tuple[int, MemoryEstimate | None]:
    """Return the largest batch whose peak is within `room` bytes, and its estimate; 0 and None if no sample fits.

    The line through two estimates gives a candidate; an estimate at the candidate verifies it or lowers it.
    """
    batch = fit(workload, recipe).largest(room)
    while batch >= 1:
        found = estimate(workload, batch, recipe)
        if found.peak <= room:
            return batch, found
        batch = min(batch - 1, int(batch * room / found.peak))
    return 0, None


class Trainer:
    """The training step that is tracked; the same for real and for fake tensors."""

    def __init__(
        self,
        workload: Workload,
        recipe: Recipe,
        batch: int,
        *,
        phase: Callable[[str], Any] = lambda name: nullcontext(),
    ) -> None:
        self.workload, self.recipe, self.batch, self.phase = workload, recipe, batch, phase
        self.module = workload.build().train()
        _freeze(self.module, recipe.frozen)
        if recipe.checkpointing:
            _checkpoint_blocks(self.module, self._emulated)
        self.trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        self.foreach = recipe.device == "cuda"  # PyTorch's default there
        self.optimizer = _OPTIMIZERS[recipe.optimizer](self.trained, lr=1e-3, foreach=self.foreach)

    def step(self, *, micro_batches: int) -> None:
        """Take one step: run micro-batches forward and backward, clip, update, drop the gradients."""
        for _ in range(micro_batches):
            with self.phase("inputs"):
                found = self.workload.batch(self.batch)
                inputs = found if isinstance(found, (tuple, list)) else (found,)
            with self.phase("forward"), self._autocast():
                loss = self.workload.loss(self.module, *inputs) / self.recipe.accumulate
            with self.phase("backward"):
                loss.backward()  # type: ignore[no-untyped-call]
            del loss, inputs, found
        if self.recipe.clip is not None:
            with self.phase("clip"):
                nn.utils.clip_grad_norm_(self.trained, self.recipe.clip, foreach=self.foreach)
        with self.phase("optimizer"):
            self.optimizer.step()
        self.optimizer.zero_grad()

    def sizes(self) -> dict[str, int]:
        """Return the bytes of parameters, buffers, all gradients, and optimizer state."""
        state = [value for of_one in self.optimizer.state.values() for value in of_one.values()]
        return {
            "parameters": _bytes(self.module.parameters()),
            "buffers": _bytes(self.module.buffers()),
            "gradients": _bytes(self.trained),
            "optimizer": _bytes(value for value in state if isinstance(value, Tensor)),
        }

    @contextmanager
    def _autocast(self) -> Iterator[None]:
        if self.recipe.precision == "fp32":
            yield
            return
        with torch.autocast("cpu", dtype=_DTYPES[self.recipe.precision]), self._emulated():
            yield

    def _emulated(self) -> AbstractContextManager[Any]:
        """Return what runs a GPU's list of operations in fp32 on a CPU."""
        half = self.recipe.precision != "fp32"
        return CudaFullPrecision() if half and self.recipe.device == "cuda" else nullcontext()


def _checkpoint_blocks(module: nn.Module, recomputing: Callable[[], AbstractContextManager[Any]]) -> None:
    """Recompute the largest list's blocks in the backward pass within `recomputing`, instead of keeping activations."""
    lists = [part for part in module.modules() if isinstance(part, (nn.ModuleList, nn.Sequential)) and len(part) > 1]
    if not lists:
        raise UsageError("checkpointing needs a list of blocks (ModuleList or Sequential), and the model has none")
    blocks = max(lists, key=lambda part: sum(p.numel() for p in part.parameters()))
    for block in blocks:
        block.forward = functools.partial(
            checkpoint, block.forward, use_reentrant=False, context_fn=lambda: (nullcontext(), recomputing())
        )


def _freeze(module: nn.Module, frozen: Sequence[str]) -> None:
    names = [name for name, _ in module.named_parameters()]
    last = names[-1].split(".")[0] if names else ""
    for part in frozen:
        if part != "*" and not any(name.startswith(part) for name in names):
            first = ", ".join(dict.fromkeys(name.split(".")[0] for name in names))
            raise UsageError(f"frozen:{part} matches no parameter; names begin with {first}")
    for name, parameter in module.named_parameters():
        if any(name.startswith(part) or (part == "*" and not name.startswith(last)) for part in frozen):
            parameter.requires_grad_(False)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
