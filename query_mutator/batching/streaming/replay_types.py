"""The records of the replay buffer: its settings, a snapshot of it, and a draw from it."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from query_mutator.batching.records import Record
from query_mutator.batching.streaming.types import StreamSample, utc_now

__all__ = ["BufferEvictionPolicy", "BufferSnapshot", "ReplayBufferConfig", "ReplayDraw"]


class BufferEvictionPolicy(StrEnum):
    """Which sample a new one replaces: the oldest, the one of lowest priority, or a random one."""

    FIFO = "fifo"
    PRIORITY = "priority"
    RANDOM = "random"


class ReplayBufferConfig(Record):
    """How many samples are kept and how they are drawn."""

    max_size: int = Field(default=100_000, ge=1)
    eviction_policy: BufferEvictionPolicy = BufferEvictionPolicy.FIFO
    priority_alpha: float = Field(default=0.6, ge=0.0, le=1.0)  # 0 = uniform, 1 = in proportion to priority
    seed: int = 42
    min_samples_before_sampling: int = Field(default=1, ge=1)
    default_priority: float = Field(default=1.0, ge=0.0, allow_inf_nan=False)  # of samples without one
    importance_beta: float = Field(default=0.4, ge=0.0, le=1.0)  # 1 = weights fully correct the draws
    max_staleness: int | None = Field(default=None, ge=1)  # a sample is evicted after this many later ones
    track_difficulty: bool = True
    track_success: bool = True


class BufferSnapshot(Record):
    """The samples of a buffer at one moment, in the order of their addition."""

    samples: tuple[StreamSample, ...]
    serials: tuple[int, ...] = ()  # number of each addition to the buffer, from 0
    timestamp: datetime = Field(default_factory=utc_now)
    total_added: int
    total_evicted: int

    @property
    def size(self) -> int:
        """Number of samples."""
        return len(self.samples)

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """A unique name for each sample: its id, and `id#2`, `id#3` for further samples of the same id."""
        seen: dict[str, int] = {}
        taken = {sample.sample_id for sample in self.samples}
        names = []
        for sample in self.samples:
            name, count = sample.sample_id, seen.get(sample.sample_id, 0) + 1
            while count > 1 and (name := f"{sample.sample_id}#{count}") in taken:
                count += 1
            seen[sample.sample_id] = count
            taken.add(name)
            names.append(name)
        return tuple(names)

    def get_lengths(self) -> dict[str, int]:
        """Return the length of every sample by its key; samples of one id are not merged."""
        return {key: sample.length for key, sample in zip(self.keys, self.samples, strict=True)}


class ReplayDraw(NamedTuple):
    """Samples drawn by priority, weights for the loss that correct for it, and serials to update priorities with."""

    samples: list[StreamSample]
    weights: NDArray[np.float32]  # [n], (size * probability)^-beta, scaled so that the largest is 1
    probabilities: NDArray[np.float64]  # [n]
    serials: NDArray[np.int64]  # [n], for `update_priorities`
