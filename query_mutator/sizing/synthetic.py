"""Data sets of known cost, to check the search for workers against a known answer.

synthetic:io       items wait 4 ms, as for a disk or a network: workers help beyond the number of processors
synthetic:cpu      items compute for 4 ms: workers help up to the number of processors
synthetic:bursty   items wait 1 ms, one in 32 for 60 ms: prefetching helps
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import Dataset

from query_mutator.sizing.stalls import ENOUGH, PREFETCHES, batch_times, predicted_stall

__all__ = ["STEP_MS", "SYNTHETIC", "Known", "Synthetic", "known_answer"]

_ITEMS = 4096


class Synthetic(Dataset[Tensor]):
    """Items that take a known time: `ms` each, one in `burst_every` at random `burst_ms`; they wait or compute."""

    def __init__(self, ms: float, *, computing: bool = False, burst_every: int = 0, burst_ms: float = 0.0) -> None:
        rng = random.Random(0)
        bursts = [burst_every > 0 and rng.random() < 1 / burst_every for _ in range(_ITEMS)]
        self.seconds = [(burst_ms if burst else ms) / 1000 for burst in bursts]
        self.computing = computing

    def __len__(self) -> int:
        return len(self.seconds)

    def __getitem__(self, index: int) -> Tensor:
        """Return 1024 numbers after the item's time."""
        if self.computing:
            ends = time.process_time() + self.seconds[index]
            while time.process_time() < ends:
                pass
        else:
            time.sleep(self.seconds[index])
        return torch.zeros(1024)


SYNTHETIC = {
    "synthetic:io": lambda: Synthetic(4.0),
    "synthetic:cpu": lambda: Synthetic(4.0, computing=True),
    "synthetic:bursty": lambda: Synthetic(1.0, burst_every=32, burst_ms=60.0),
}
#: Milliseconds of a step at which the answer is clear: 3 workers, 2 (with two processors or more), and 1 with 4 ahead
STEP_MS = {"synthetic:io": 14.0, "synthetic:cpu": 24.0, "synthetic:bursty": 35.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """The answer that a search should find: workers, and batches ahead of each."""

    workers: int
    prefetch: int
    enough: bool


def known_answer(name: str, *, batch_size: int, step_s: float, cpus: float) -> Known:
    """Return the smallest number of workers that is enough, simulated from the true times of the set's items."""
    items = SYNTHETIC[name]()
    batch_s = batch_times(items.seconds, batch_size=batch_size)
    most = max(1, int(cpus)) if items.computing else 64
    share = 1.0 if items.computing else 0.0
    for workers in range(most + 1):
        for prefetch in PREFETCHES if workers else PREFETCHES[:1]:
            stall = predicted_stall(
                batch_s, workers=workers, prefetch=prefetch, step_s=step_s, cpus=cpus, cpu_share=share
            )
            if stall <= ENOUGH:
                return Known(workers=workers, prefetch=prefetch, enough=True)
    return Known(workers=most, prefetch=PREFETCHES[0], enough=False)
