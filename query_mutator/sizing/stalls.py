"""How long a training step waits for its batch: worker processes as a queue, worked through by hand.

    k batch    W workers    P batches ahead per worker

Batch k is made by worker k mod W, which starts it when its last one is done and batch k - W P has been taken. Batches
are taken in order.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

BATCHES = 2000
ENOUGH = 0.05  # of the time that steps may wait
PREFETCHES = (2, 4, 8)


def batch_times(item_s: Sequence[float], *, batch_size: int, collate_s: float = 0.0, seed: int = 0) -> list[float]:
    """Return seconds that batches take to make, their items drawn from those measured."""
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
    """Return the share of time that steps of `step_s` wait; beyond `cpus` busy workers slow each other down."""
    if workers == 0:
        made = sum(batch_s) / len(batch_s)
        return made / (made + step_s)
    slowed = max(1.0, workers * cpu_share / cpus)
    ahead, waited = workers * prefetch, 0.0
    done, taken = [0.0] * workers, [0.0] * len(batch_s)
    now = 0.0
    for k, seconds in enumerate(batch_s):
        begins = max(done[k % workers], taken[k - ahead] if k >= ahead else 0.0)
        done[k % workers] = begins + slowed * seconds
        if k >= 2 * ahead:  # the first ones find the queue empty, as it never is later
            waited += max(0.0, done[k % workers] - now)
        taken[k] = max(now, done[k % workers])
        now = taken[k] + step_s
    steps = max(1, len(batch_s) - 2 * ahead) * step_s
    return waited / (waited + steps) if waited + steps else 0.0
