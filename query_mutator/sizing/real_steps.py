"""Real training steps in a process of their own: `python -m query_mutator.sizing.real_steps TASK`, JSON in and out.

Running out of memory there is an answer, not an accident: {"fits": false}.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from typing import Any

import torch

from query_mutator.errors import UsageError
from query_mutator.sizing.child import ERROR_MARK
from query_mutator.sizing.memory import Recipe, Trainer, Workload, measured_peak
from query_mutator.sizing.model_flags import recipe_of, workload_of


def main() -> int:
    """Carry out the task that the command line holds, and print what was found as a line of JSON."""
    task = json.loads(sys.argv[1])
    try:
        workload, recipe = workload_of(task["model"], task["sizes"]), recipe_of(task["variant"], task["optimizer"])
        measure = _peak if task["measure"] == "peak" else _speed
        found = measure(workload, int(task["batch"]), recipe, task)
    except UsageError as error:
        print(f"{ERROR_MARK}{error}", file=sys.stderr)
        return 2
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if "out of memory" not in str(error).lower() and "can't allocate" not in str(error).lower():
            raise
        found = {"fits": False}
    print(json.dumps(found))
    return 0


def _peak(workload: Workload, batch: int, recipe: Recipe, task: dict[str, Any]) -> dict[str, Any]:
    """Return the bytes at the peak of two steps: the profiler's account on a CPU, the allocator's on a GPU."""
    if task["device"] == "cpu":
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]  # its scratch memory is not PyTorch's
        real = replace(recipe, foreach=False, autocast="cpu")
        return {"fits": True, "peak": measured_peak(workload, batch, real)}
    torch.cuda.reset_peak_memory_stats()
    with torch.device(task["device"]):
        trainer = Trainer(workload, recipe, batch, device=task["device"])
        for _ in range(2):
            trainer.step(micro_batches=recipe.accumulate)
    free, total = torch.cuda.mem_get_info()
    return {
        "fits": True,
        "peak": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "card": total - free,
    }


def _speed(workload: Workload, batch: int, recipe: Recipe, task: dict[str, Any]) -> dict[str, Any]:
    """Return the seconds of a step, the median after one that warms up."""
    with torch.device(task["device"]):
        trainer = Trainer(workload, recipe, batch, device=task["device"])
        trainer.step(micro_batches=recipe.accumulate)
        seconds: list[float] = []
        ends = time.perf_counter() + float(task["seconds"])
        while len(seconds) < 3 or (time.perf_counter() < ends and len(seconds) < 1000):
            began = time.perf_counter()
            trainer.step(micro_batches=recipe.accumulate)
            if task["device"] != "cpu":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
    return {"fits": True, "step_s": sorted(seconds)[len(seconds) // 2], "steps": len(seconds)}


if __name__ == "__main__":
    sys.exit(main())
