"""The records of the replay buffer: its settings, what it held at one moment, and what was drawn from it."""

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


class BufferEvictionPolicy(StrEnum):
    """Which sample makes room for a new one: the oldest, the one of lowest priority, or any."""

    FIFO = "fifo"
    PRIORITY = "priority"
    RANDOM = "random"


class ReplayBufferConfig(Record):
    """How much is kept and how it is drawn."""

    max_size: int = Field(default=100_000, ge=1)
    eviction_policy: BufferEvictionPolicy = BufferEvictionPolicy.FIFO
    priority_alpha: float = Field(default=0.6, ge=0.0, le=1.0)  # 0 = uniform, 1 = in proportion to priority
    seed: int = 42
    min_samples_before_sampling: int = Field(default=1, ge=1)
    default_priority: float = Field(default=1.0, ge=0.0, allow_inf_nan=False)  # of samples that bring none
    importance_beta: float = Field(default=0.4, ge=0.0, le=1.0)  # 1 = draws fully corrected by the weights
    max_staleness: int | None = Field(default=None, ge=1)  # a sample leaves after this many later ones
    track_difficulty: bool = True
    track_success: bool = True


class BufferSnapshot(Record):
    """What a buffer held at one moment, in the order it was added."""

    samples: tuple[StreamSample, ...]
    serials: tuple[int, ...] = ()  # which addition to the buffer each was, from 0
    timestamp: datetime = Field(default_factory=utc_now)
    total_added: int
    total_evicted: int

    @property
    def size(self) -> int:
        """Number of samples."""
        return len(self.samples)

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """A name for each sample: its id, and `id#2`, `id#3` for further samples of the same id."""
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

    def by_key(self) -> dict[str, StreamSample]:
        """Return the samples by their keys."""
        return dict(zip(self.keys, self.samples, strict=True))


class ReplayDraw(NamedTuple):
    """Samples drawn by priority, what a loss is multiplied by to undo that, and where to report new priorities."""

    samples: list[StreamSample]
    weights: NDArray[np.float32]  # [n], (size * probability)^-beta, scaled so that the largest is 1
    probabilities: NDArray[np.float64]  # [n]
    serials: NDArray[np.int64]  # [n], for `update_priorities`
