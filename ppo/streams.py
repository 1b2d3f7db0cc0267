"""Random streams: one for each environment and purpose, saved and restored with a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["ACTION_STREAM", "SHUFFLE_STREAM", "restore_streams"]

# Purposes of random streams; gymnasium's streams have none, so no two coincide.
ACTION_STREAM, SHUFFLE_STREAM = 1, 2


def restore_streams(rngs: Sequence[np.random.Generator], states: Sequence[Any]) -> None:
    """Restore the environments' random streams; ValueError for another number of them."""
    if len(states) != len(rngs):
        raise ValueError(
            f"the checkpoint has {len(states)} environments, this run {len(rngs)}; try num_processes={len(states)}"
        )
    for rng, state in zip(rngs, states, strict=True):
        rng.bit_generator.state = state
