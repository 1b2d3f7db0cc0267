"""Predict how long a training step waits for its batch: simulate the loader's worker processes as a queue.

    k batch    W workers    P batches ahead per worker

Worker k mod W makes batch k; it starts when its last batch is done and batch k - W P has been taken. Batches are taken
in order.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

__all__ = ["ENOUGH", "PREFETCHES", "batch_times", "predicted_stall"]

BATCHES = 2000  # simulated
ENOUGH = 0.05  # share of the time that steps may wait
PREFETCHES = (2, 4, 8)


def batch_times(item_s: Sequence[float], *, batch_size: int, collate_s: float = 0.0, seed: int = 0) -> list[float]:
    """Return the seconds that batches take to make, with items drawn from those measured."""
    rng = random.Random(seed)
    return [sum(rng.choices(item_s, k=batch_size)) + collate_s for _ in range(BATCHES)]


def predicted_stall(
    batch_s: Sequence[float],
    *,
    workers: int,
    prefetch: int,
    step_s: float,
    cpus: float = float("inf"),
    cpu_share: float = 0.0,
) -> float:
    """Return the share of time that steps of `step_s` wait; more than `cpus` busy workers slow each other down."""
    if workers == 0:
        made = sum(batch_s) / max(1, len(batch_s))
        return made / (made + step_s) if made + step_s else 0.0
    slowed = max(1.0, workers * cpu_share / cpus)
    ahead, waited, now = workers * prefetch, 0.0, 0.0
    done, taken = [0.0] * workers, [0.0] * len(batch_s)
    for k, seconds in enumerate(batch_s):
        begins = max(done[k % workers], taken[k - ahead] if k >= ahead else 0.0)
        done[k % workers] = begins + slowed * seconds
        if k >= 2 * ahead:  # the queue starts empty, which is not its steady state
            waited += max(0.0, done[k % workers] - now)
        taken[k] = max(now, done[k % workers])
        now = taken[k] + step_s
    steps = max(1, len(batch_s) - 2 * ahead) * step_s
    return waited / (waited + steps) if waited + steps else 0.0
