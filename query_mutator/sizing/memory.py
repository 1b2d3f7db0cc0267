"""Peak memory of a training step: forward, backward, clipping, optimizer; how it grows with the batch, and what fits.

    B samples in a (micro) batch

Two whole steps are followed, because the optimizer's state appears in the first. At small batches the optimizer's own
temporaries are the peak, at large ones the activations: peak(B) = max(floor, a + b B).
"""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from query_mutator.errors import UsageError
from query_mutator.sizing.allocator import reserved_peak
from query_mutator.sizing.autocast import CudaFullPrecision
from query_mutator.sizing.fits import Fit
from query_mutator.sizing.tracker import BLOCK_BYTES, Ledger, StorageTracker

Precision = Literal["fp32", "bf16", "fp16"]
Optimizer = Literal["adamw", "adam", "sgd"]
Batch = tuple[Tensor, ...]

MIB = 2**20
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is trained: `build()` the module, `batch(B)` its inputs, `loss(module, *inputs)` a scalar."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    loss: Callable[..., Tensor]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How it is trained."""

    precision: Precision = "fp32"
    optimizer: Optimizer = "adamw"
    accumulate: int = 1
    checkpointing: bool = False
    frozen: tuple[str, ...] = ()  # beginnings of parameter names; "*" for all but the last module
    clip: float | None = 1.0
    foreach: bool = True  # as on CUDA; False as on a CPU
    set_to_none: bool = True
    autocast: Literal["cuda", "cpu"] = "cuda"  # whose list of operations stays in 32 bit with bf16 and fp16


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes of a training step at one batch size."""

    batch: int
    peak: int
    reserved: int  # what an allocator that keeps its blocks would hold, simulated
    phases: dict[str, int]
    parameters: int
    buffers: int
    gradients: int
    optimizer: int
    flops: int
    seconds: float  # the estimate took

    @property
    def activations(self) -> int:
        """Return what is left of the peak: activations, inputs and temporaries."""
        return max(0, self.peak - self.parameters - self.buffers - self.gradients - self.optimizer)


def estimate(
    workload: Workload, batch: int, recipe: Recipe | None = None, *, rounding: int = BLOCK_BYTES
) -> MemoryEstimate:
    """Return the memory of a training step without taking it; UsageError when the model's code needs real numbers."""
    recipe, began = recipe or Recipe(), time.perf_counter()
    ledger, fake = Ledger(rounding=rounding), FakeTensorMode(allow_non_fake_inputs=True)
    scratch = recipe.autocast == "cpu" and not torch.backends.mkldnn.enabled
    tracker = StorageTracker(ledger, fake, scratch=scratch)
    followed = min(recipe.accumulate, 2)  # further micro-batches add nothing
    with _quiet(), fake, tracker:
        trainer = Trainer(workload, recipe, batch, phase=tracker.phase)
        try:
            trainer.step(micro_batches=1)
            tracker.flops = 0
            trainer.step(micro_batches=followed)
            peaks, trace = dict(ledger.peaks), list(ledger.trace)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise UsageError(f"{workload.name} cannot be sized without data: {reason}") from error
        sizes = trainer.sizes()
    peaks.pop("build", None)
    return MemoryEstimate(
        batch=batch,
        peak=max(peaks.values()),
        reserved=reserved_peak(trace),
        phases=peaks,
        flops=tracker.flops * recipe.accumulate // followed,
        seconds=time.perf_counter() - began,
        **sizes,
    )


def measured_peak(workload: Workload, batch: int, recipe: Recipe | None = None) -> int:
    """Return the real peak on this CPU, by the profiler's account of every block: what estimates are checked with."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        trainer = Trainer(workload, recipe or Recipe(), batch)
        for _ in range(2):
            trainer.step(micro_batches=trainer.recipe.accumulate)
    del trainer
    live = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


def fit(workload: Workload, recipe: Recipe | None = None, *, batches: tuple[int, int] = (16, 32)) -> Fit:
    """Return how the peak grows with the batch, from two estimates and the optimizer's own peak."""
    small, large = (estimate(workload, batch, recipe) for batch in batches)
    of_batch = [max(found.phases["forward"], found.phases["backward"]) for found in (small, large)]
    slope = (of_batch[1] - of_batch[0]) / (batches[1] - batches[0])
    floor = max(peak for name, peak in small.phases.items() if name not in ("forward", "backward"))
    return Fit(floor=floor, base=of_batch[0] - slope * batches[0], slope=slope)


def largest_batch(workload: Workload, room: float, recipe: Recipe | None = None) -> tuple[int, MemoryEstimate | None]:
    """Return the largest batch whose peak is within `room` bytes, and its estimate; 0 and None when not one sample is.

    What the line through two estimates says is verified at the answer, and corrected downwards where it said too much.
    """
    batch = fit(workload, recipe).largest(room)
    while batch >= 1:
        found = estimate(workload, batch, recipe)
        if found.peak <= room:
            return batch, found
        batch = min(batch - 1, int(batch * room / found.peak))
    return 0, None


def with_what_if(recipe: Recipe, items: Sequence[str]) -> Recipe:
    """Return the recipe changed as `--what-if` says: bf16, fp16, checkpointing, accumulate:N, frozen[:PREFIX], sgd."""
    for item in items:
        name, _, value = item.partition(":")
        if name in ("bf16", "fp16", "fp32"):
            recipe = replace(recipe, precision=name)  # type: ignore[arg-type]
        elif name in ("sgd", "adam", "adamw"):
            recipe = replace(recipe, optimizer=name)  # type: ignore[arg-type]
        elif name == "checkpointing" and not value:
            recipe = replace(recipe, checkpointing=True)
        elif name == "accumulate" and value.isdigit() and int(value) > 0:
            recipe = replace(recipe, accumulate=int(value))
        elif name == "frozen":
            recipe = replace(recipe, frozen=(value or "*",))
        else:
            known = "bf16, fp16, checkpointing, accumulate:N, frozen, frozen:PREFIX, sgd, adam, adamw"
            raise UsageError(f"--what-if {item}: known are {known}")
    return recipe


class Trainer:
    """The training step that is followed; the same with real tensors and with fake ones."""

    def __init__(
        self,
        workload: Workload,
        recipe: Recipe,
        batch: int,
        *,
        phase: Callable[[str], Any] = lambda name: nullcontext(),
        device: str = "cpu",
    ) -> None:
        self.workload, self.recipe, self.batch, self.phase = workload, recipe, batch, phase
        self.device = device
        module = workload.build().train()
        self.module = module if device == "cpu" else module.to(device)  # weights that are fake cannot be moved
        _freeze(self.module, recipe.frozen)
        if recipe.checkpointing:
            checkpoint_blocks(self.module)
        self.trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        self.optimizer = _optimizer(recipe, self.trained)

    def step(self, *, micro_batches: int) -> None:
        """Take one step: micro-batches forward and backward, clip, update, forget the gradients."""
        for _ in range(micro_batches):
            with self.phase("inputs"):
                inputs = self.workload.batch(self.batch)
                if self.device != "cpu":
                    inputs = tuple(part.to(self.device) for part in inputs)
            with self.phase("forward"), self._autocast():
                loss = self.workload.loss(self.module, *inputs) / self.recipe.accumulate
            with self.phase("backward"):
                loss.backward()  # type: ignore[no-untyped-call]
            del loss, inputs
        if self.recipe.clip is not None:
            with self.phase("clip"):
                nn.utils.clip_grad_norm_(self.trained, self.recipe.clip, foreach=self.recipe.foreach)
        with self.phase("optimizer"):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=self.recipe.set_to_none)

    def sizes(self) -> dict[str, int]:
        """Return the bytes of parameters, buffers, gradients at their most, and optimizer state."""
        state = [value for of_one in self.optimizer.state.values() for value in of_one.values()]
        return {
            "parameters": _bytes(self.module.parameters()),
            "buffers": _bytes(self.module.buffers()),
            "gradients": _bytes(self.trained),
            "optimizer": _bytes(value for value in state if isinstance(value, Tensor)),
        }

    def _autocast(self) -> Any:
        if self.recipe.precision == "fp32":
            return nullcontext()
        kind = self.device.partition(":")[0]
        autocast = torch.autocast(kind, dtype=_DTYPES[self.recipe.precision])
        if self.recipe.autocast == kind or kind != "cpu":
            return autocast
        both = ExitStack()
        both.enter_context(autocast)
        both.enter_context(CudaFullPrecision())
        return both


def checkpoint_blocks(module: nn.Module) -> None:
    """Have the blocks of the largest list of like modules computed again in the backward pass instead of kept."""
    lists = [part for part in module.modules() if isinstance(part, (nn.ModuleList, nn.Sequential)) and len(part) > 1]
    if not lists:
        raise UsageError("checkpointing needs a list of blocks (ModuleList or Sequential), and the model has none")
    blocks = max(lists, key=lambda part: sum(p.numel() for p in part.parameters()))
    for block in blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def _freeze(module: nn.Module, frozen: Sequence[str]) -> None:
    names = [name for name, _ in module.named_parameters()]
    last = names[-1].split(".")[0] if names else ""
    for part in frozen:
        if part != "*" and not any(name.startswith(part) for name in names):
            first = ", ".join(dict.fromkeys(name.split(".")[0] for name in names))
            raise UsageError(f"frozen:{part}: no parameter begins so; they begin with {first}")
    for name, parameter in module.named_parameters():
        if any(name.startswith(part) or (part == "*" and not name.startswith(last)) for part in frozen):
            parameter.requires_grad_(False)


def _optimizer(recipe: Recipe, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=1e-3, foreach=recipe.foreach)
    kind = torch.optim.AdamW if recipe.optimizer == "adamw" else torch.optim.Adam
    return kind(parameters, lr=1e-3, foreach=recipe.foreach)


def _bytes(tensors: Iterator[Tensor] | Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
