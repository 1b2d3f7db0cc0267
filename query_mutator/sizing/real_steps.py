"""Describe what to train in plain values, take real steps of it in a child process, measure their memory or speed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from query_mutator.errors import UsageError
from query_mutator.sizing.budget import machine_budget
from query_mutator.sizing.child import load_target, run_child

if TYPE_CHECKING:
    from query_mutator.sizing.memory import Recipe, Workload

__all__ = ["ModelSpec", "RealStep", "bisect", "fits_memory", "knee_line", "knee_of", "measure", "pick_device"]

KNEE = 0.9  # share of the highest throughput
_SHARE_OF_MEMORY = 0.8  # of the machine's, that an estimate may reach
_OUT_OF_MEMORY = ("out of memory", "can't allocate")  # what CUDA's and the CPU's allocator say


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A preset or `package.module:function`, its sizes, and how to train it; `variant` is as `bf16+checkpointing`."""

    model: str
    sizes: dict[str, Any] = field(default_factory=dict)
    optimizer: Literal["adamw", "adam", "sgd"] = "adamw"
    variant: str | None = None

    def workload(self) -> Workload:
        """Return what to train; UsageError for an unknown preset or a function that returns something else."""
        from query_mutator.sizing.memory import Workload
        from query_mutator.sizing.presets import preset

        if ":" not in self.model:
            return preset(self.model, **self.sizes)
        made = load_target(self.model)(**self.sizes)
        if not isinstance(made, Workload):
            raise UsageError(
                f"{self.model} returns a {type(made).__name__}; return a query_mutator.sizing.memory.Workload"
            )
        return made

    def recipe(self) -> Recipe:
        """Return how to train it; UsageError for an unknown variant."""
        from query_mutator.sizing.memory import recipe_of

        return recipe_of(self.variant, self.optimizer)


@dataclass(frozen=True, slots=True, kw_only=True)
class RealStep:
    """What real steps took: bytes (the peak and, on a GPU, what the allocator reserved) or seconds."""

    fits: bool = True
    peak: int = 0
    reserved: int | None = None
    step_s: float = 0.0
    steps: int = 0


def measure(spec: ModelSpec, batch: int, *, device: str, timeout_s: float, seconds: float | None = None) -> RealStep:
    """Return the peak memory of two steps or, with `seconds`, the time of a step; measured in a child process."""
    task = {"spec": asdict(spec), "batch": batch, "device": device, "seconds": seconds}
    what = f"{spec.model} at batch {batch}"
    return RealStep(**run_child("query_mutator.sizing.real_steps:take_steps", task, what=what, timeout_s=timeout_s))


def take_steps(*, spec: Mapping[str, Any], batch: int, device: str, seconds: float | None) -> dict[str, Any]:
    """Return the fields of a RealStep; the child's half of `measure`."""
    import torch

    described = ModelSpec(**spec)
    try:
        workload, recipe = described.workload(), described.recipe()
        if seconds is None:
            return _peak(workload, batch, recipe, device)
        return _speed(workload, batch, recipe, device, seconds)
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not any(words in str(error).lower() for words in _OUT_OF_MEMORY):
            raise
        return {"fits": False}


def _peak(workload: Workload, batch: int, recipe: Recipe, device: str) -> dict[str, Any]:
    """Return the peak of two steps: from the profiler's record on a CPU, from the allocator on a GPU."""
    import torch

    from query_mutator.sizing.memory import Trainer, measured_peak

    if device == "cpu":
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]  # its scratch memory bypasses PyTorch
        return {"peak": measured_peak(workload, batch, recipe.on("cpu"))}
    torch.cuda.reset_peak_memory_stats()
    with torch.device(device):
        trainer = Trainer(workload, recipe, batch, device=device)
        for _ in range(2):
            trainer.step(micro_batches=recipe.accumulate)
    return {"peak": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}


def _speed(workload: Workload, batch: int, recipe: Recipe, device: str, seconds: float) -> dict[str, Any]:
    """Return the median time of a step after one that warms up."""
    import torch

    from query_mutator.sizing.memory import Trainer

    with torch.device(device):
        trainer = Trainer(workload, recipe, batch, device=device)
        trainer.step(micro_batches=recipe.accumulate)
        times: list[float] = []
        ends = time.perf_counter() + seconds
        while len(times) < 3 or (time.perf_counter() < ends and len(times) < 1000):
            began = time.perf_counter()
            trainer.step(micro_batches=recipe.accumulate)
            if device != "cpu":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
    return {"step_s": median(times), "steps": len(times)}


def pick_device(name: str) -> str:
    """Return the device to measure on, a GPU for `auto` if there is one; UsageError for a GPU that is missing."""
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name != "cpu" and not torch.cuda.is_available():
        raise UsageError(f"--device {name} cannot be used: PyTorch sees no GPU; use --device cpu")
    return name


def fits_memory(spec: ModelSpec, batch: int) -> bool:
    """Return whether the estimate of a step on this machine's CPU is within most of its memory."""
    from query_mutator.sizing.memory import estimate

    memory = machine_budget().memory_bytes
    return memory is None or (
        estimate(spec.workload(), batch, spec.recipe().on("cpu")).peak < _SHARE_OF_MEMORY * memory
    )


def bisect(fits: Callable[[int], bool], *, most: int = 2**16) -> int:
    """Return the largest batch that fits: double until one does not, then halve the interval; 0 if none does."""
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, 2 * high
    while high - low > max(1, low // 64):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def knee_of(rates: Mapping[int, float]) -> int | None:
    """Return the smallest batch with 90 % of the highest throughput; None if the largest batch is still faster."""
    knee = min(batch for batch, rate in rates.items() if rate >= KNEE * max(rates.values()))
    return None if knee == max(rates) else knee


def knee_line(rates: Mapping[int, float]) -> str:
    """Return the knee in words."""
    knee = knee_of(rates)
    if knee is None:
        return f"no knee up to batch {max(rates)}: throughput still rises there; measure larger batches"
    share = rates[knee] / max(rates.values())
    return f"knee at batch {knee}: {share:.0%} of the highest throughput; larger batches take memory and gain little"
