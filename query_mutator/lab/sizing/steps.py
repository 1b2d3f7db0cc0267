"""Take real training steps in a child process, and measure their memory or their speed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from query_mutator.errors import UsageError
from query_mutator.lab.sizing.machine import load_target, machine_budget, run_child
from query_mutator.lab.sizing.workload import Optimizer, Recipe, Workload, recipe_of

__all__ = ["ModelSpec", "RealStep", "bisect", "fits_memory", "knee_line", "measure", "pick_device", "take_steps"]

KNEE = 0.9  # share of the highest throughput
_SHARE_OF_MEMORY = 0.8  # of the machine's, that an estimate may reach
_OUT_OF_MEMORY = ("out of memory", "can't allocate")  # what CUDA's and the CPU's allocator say


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model of `models.MODELS` or `package.module:function`, its sizes, and how to train it, in plain values.

    `variant` is as `bf16+checkpointing`.
    """

    model: str
    sizes: dict[str, Any] = field(default_factory=dict)
    optimizer: Optimizer = "adamw"
    variant: str | None = None
    onednn: bool = True  # on a CPU

    def workload(self) -> Workload:
        """Return what to train; UsageError for an unknown model or a function that returns something else."""
        from query_mutator.lab.sizing.models import model

        if ":" not in self.model:
            return model(self.model, **self.sizes)
        made = load_target(self.model)(**self.sizes)
        if not isinstance(made, Workload):
            raise UsageError(
                f"{self.model} returns a {type(made).__name__}; return a query_mutator.lab.sizing.Workload"
            )
        return made

    def recipe(self) -> Recipe:
        """Return how to train it; UsageError for an unknown variant."""
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
    return RealStep(**run_child("query_mutator.lab.sizing.steps:take_steps", task, what=what, timeout_s=timeout_s))


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
    from query_mutator.lab.sizing.memory import estimate
    from query_mutator.lab.sizing.tracker import onednn

    memory = machine_budget().memory_bytes
    try:
        with onednn(spec.onednn):
            peak = estimate(spec.workload(), batch, spec.recipe().on("cpu")).peak
    except UsageError:  # its sizes depend on data: only real steps show them
        return True
    return memory is None or peak < _SHARE_OF_MEMORY * memory


def bisect(fits: Callable[[int], bool], *, most: int = 2**16) -> int:
    """Return the largest batch that fits: double until one does not, then halve the interval; 0 if none does."""
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, 2 * high
    while high - low > max(1, low // 64):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def knee_line(rates: Mapping[int, float]) -> str:
    """Return the knee in words: the smallest batch with 90 % of the highest throughput, unless it is the largest."""
    knee = min(batch for batch, rate in rates.items() if rate >= KNEE * max(rates.values()))
    if knee == max(rates):
        return f"no knee up to batch {knee}: throughput still rises there; measure larger batches"
    share = rates[knee] / max(rates.values())
    return f"knee at batch {knee}: {share:.0%} of the highest throughput; larger batches take memory and gain little"


# --- in the child process ---------------------------------------------------------------------------------------------


def take_steps(*, spec: Mapping[str, Any], batch: int, device: str, seconds: float | None) -> dict[str, Any]:
    """Return the fields of a RealStep; running out of memory is one."""
    from query_mutator.lab.sizing.tracker import onednn

    described = ModelSpec(**spec)
    try:
        with onednn(described.onednn):
            task = described.workload(), batch, described.recipe(), device
            return _peak(*task) if seconds is None else _speed(*task, seconds=seconds)
    except (MemoryError, RuntimeError) as error:  # among them CUDA's
        if not any(words in str(error).lower() for words in _OUT_OF_MEMORY):
            raise
        return {"fits": False}


def _peak(workload: Workload, batch: int, recipe: Recipe, device: str) -> dict[str, Any]:
    """Return the peak of two steps: from the profiler's record on a CPU, from the allocator on a GPU."""
    import torch

    from query_mutator.lab.sizing.memory import Trainer, measured_peak

    if device == "cpu":
        return {"peak": measured_peak(workload, batch, recipe.on("cpu"))}
    torch.cuda.reset_peak_memory_stats()
    with torch.device(device):
        trainer = Trainer(workload, recipe, batch, device=device)
        for _ in range(2):
            trainer.step(micro_batches=recipe.accumulate)
    return {"peak": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}


def _speed(workload: Workload, batch: int, recipe: Recipe, device: str, *, seconds: float) -> dict[str, Any]:
    """Return the median time of a step after one that warms up."""
    import torch

    from query_mutator.lab.sizing.memory import Trainer

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
