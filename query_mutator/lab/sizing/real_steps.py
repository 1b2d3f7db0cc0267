"""Describe what to train in plain values, take real steps of it in a child process, measure their memory or speed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from query_mutator.errors import UsageError
from query_mutator.lab.sizing.budget import machine_budget
from query_mutator.lab.sizing.child import load_target, run_child
from query_mutator.lab.sizing.workload import Optimizer, Recipe, Workload, recipe_of
from query_mutator.plugins import load_plugins

__all__ = [
    "ModelSpec",
    "RealStep",
    "bisect",
    "fits_memory",
    "knee_line",
    "knee_of",
    "measure",
    "pick_device",
]

KNEE = 0.9  # share of the highest throughput
_SHARE_OF_MEMORY = 0.8  # of the machine's, that an estimate may reach


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A preset or `package.module:function`, its sizes, and how to train it.

    `variant` is as `bf16+checkpointing`; `plugins` are modules that register presets, imported before the model is
    looked up, here and in child processes.
    """

    model: str
    sizes: dict[str, Any] = field(default_factory=dict)
    optimizer: Optimizer = "adamw"
    variant: str | None = None
    onednn: bool = True  # on a CPU
    plugins: tuple[str, ...] = ()

    def workload(self) -> Workload:
        """Return what to train; UsageError for an unknown preset or a function that returns something else."""
        from query_mutator.lab.sizing.presets import preset

        load_plugins(self.plugins)
        if ":" not in self.model:
            return preset(self.model, **self.sizes)
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
    return RealStep(**run_child("query_mutator.lab.sizing.steps_child:run", task, what=what, timeout_s=timeout_s))


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
    from query_mutator.lab.sizing.scratch import onednn

    memory = machine_budget().memory_bytes
    if memory is None:
        return True
    try:
        with onednn(spec.onednn):
            return estimate(spec.workload(), batch, spec.recipe().on("cpu")).peak < _SHARE_OF_MEMORY * memory
    except UsageError:  # its sizes depend on data: only real steps show them
        return True


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
