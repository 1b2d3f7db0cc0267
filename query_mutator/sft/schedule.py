"""The step size over a run: up in a line, down as a cosine."""

from __future__ import annotations

import math


def cosine_lr(step: int, total_steps: int, *, peak: float, warmup_ratio: float, min_lr_ratio: float) -> float:
    """Return the step size of optimiser step `step`, counted from 0."""
    warmup = math.ceil(warmup_ratio * total_steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    lowest = peak * min_lr_ratio
    done = (step - warmup) / max(1, total_steps - warmup)
    return lowest + (peak - lowest) * (1 + math.cos(math.pi * min(1.0, done))) / 2
