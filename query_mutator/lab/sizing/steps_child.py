"""Take real training steps and measure them: the half of `real_steps.measure` that runs in the child process."""

from __future__ import annotations

import time
from collections.abc import Mapping
from statistics import median
from typing import Any

import torch

from query_mutator.lab.sizing.memory import Trainer, measured_peak
from query_mutator.lab.sizing.real_steps import ModelSpec
from query_mutator.lab.sizing.scratch import onednn
from query_mutator.lab.sizing.workload import Recipe, Workload

__all__ = ["run"]

_OUT_OF_MEMORY = ("out of memory", "can't allocate")  # what CUDA's and the CPU's allocator say


def run(*, spec: Mapping[str, Any], batch: int, device: str, seconds: float | None) -> dict[str, Any]:
    """Return the fields of a RealStep; running out of memory is one."""
    described = ModelSpec(**spec)
    try:
        workload, recipe = described.workload(), described.recipe()
        with onednn(described.onednn):
            if seconds is None:
                return _peak(workload, batch, recipe, device)
            return _speed(workload, batch, recipe, device, seconds)
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not any(words in str(error).lower() for words in _OUT_OF_MEMORY):
            raise
        return {"fits": False}


def _peak(workload: Workload, batch: int, recipe: Recipe, device: str) -> dict[str, Any]:
    """Return the peak of two steps: from the profiler's record on a CPU, from the allocator on a GPU."""
    if device == "cpu":
        return {"peak": measured_peak(workload, batch, recipe.on("cpu"))}
    torch.cuda.reset_peak_memory_stats()
    with torch.device(device):
        trainer = Trainer(workload, recipe, batch, device=device)
        for _ in range(2):
            trainer.step(micro_batches=recipe.accumulate)
    return {"peak": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}


def _speed(workload: Workload, batch: int, recipe: Recipe, device: str, seconds: float) -> dict[str, Any]:
    """Return the median time of a step after one that warms up."""
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
