"""A bounded store of stream samples that are drawn again, those of high priority more often.

Adding, evicting, changing a priority and drawing take microseconds at any size, whatever the eviction policy: none of
them iterates over the samples.
"""

from __future__ import annotations

import heapq
import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from functools import cached_property
from math import isfinite
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from query_mutator.batching.records import Record
from query_mutator.batching.streaming.types import SampleSource, StreamSample, utc_now
from query_mutator.errors import UsageError
from query_mutator.files import read_checked_json, write_checked_json
from query_mutator.stats import WeightedSampler

VERSION = 2


class BufferEvictionPolicy(StrEnum):
    """Policy for evicting a sample: the oldest, the lowest priority, or a random one."""

    FIFO = "fifo"
    PRIORITY = "priority"
    RANDOM = "random"


class ReplayBufferConfig(Record):
    """Settings of capacity and sampling."""

    max_size: int = Field(default=100_000, ge=1)
    eviction_policy: BufferEvictionPolicy = BufferEvictionPolicy.FIFO
    priority_alpha: float = Field(default=0.6, ge=0.0, le=1.0)  # 0 = uniform, 1 = in proportion to priority
    seed: int = 42
    min_samples_before_sampling: int = Field(default=1, ge=1)
    default_priority: float = Field(default=1.0, ge=0.0, allow_inf_nan=False)  # of samples without one
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


def _mean(values: Iterable[float | bool | None]) -> float:
    """Return the mean of the values that are known, 0 without any."""
    known = [float(value) for value in values if value is not None]
    return sum(known) / len(known) if known else 0.0


class ReplayBuffer:
    """Keep up to `max_size` samples; threads may add and draw at the same time.

    A sample stays in its slot until another replaces it. Files include the state of the random stream: a restored
    buffer draws and evicts what this one would.
    """

    def __init__(self, config: ReplayBufferConfig | None = None) -> None:
        self.config = config or ReplayBufferConfig()
        self.total_added = 0
        self.total_evicted = 0
        self._rng = np.random.default_rng(self.config.seed)
        self._lock = threading.RLock()
        self._empty()

    def _empty(self) -> None:
        self._samples: list[StreamSample] = []
        self._serials: list[int] = []  # number of the addition to the buffer, from 0
        self._priorities: list[float] = []
        self._slots_of: dict[str, list[int]] = {}  # by sample id
        self._weights = WeightedSampler()  # of priority^alpha
        self._oldest = 0  # slot that policy "fifo" evicts next
        # Heap of (priority, serial, slot) for policy "priority"; outdated entries are skipped.
        self._lowest: list[tuple[float, int, int]] = []

    # --- what is held ----------------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Number of samples held."""
        return len(self._samples)

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def is_full(self) -> bool:
        """Return whether the next sample replaces another."""
        return self.size >= self.config.max_size

    @property
    def can_sample(self) -> bool:
        """Return whether the buffer holds enough samples to draw from."""
        return self.size >= self.config.min_samples_before_sampling

    @property
    def mean_difficulty(self) -> float:
        """Mean difficulty of the samples that have one; 0 without any, or without `track_difficulty`."""
        return _mean(one.difficulty for one in self.get_all()) if self.config.track_difficulty else 0.0

    @property
    def mean_reward(self) -> float:
        """Mean reward of the samples that have one, 0 without any."""
        return _mean(one.reward for one in self.get_all())

    @property
    def mean_priority(self) -> float:
        """Mean priority of the samples, 0 without any."""
        return _mean(self._priorities)

    @property
    def success_rate(self) -> float:
        """Share of successes among samples with an outcome; 0 without any, or without `track_success`."""
        return _mean(one.success for one in self.get_all()) if self.config.track_success else 0.0

    def get_all(self) -> list[StreamSample]:
        """Return all samples in the order of their addition, not marked as replays."""
        with self._lock:
            return [self._samples[slot] for slot in self._by_age()]

    def _by_age(self) -> list[int]:
        return sorted(range(self.size), key=self._serials.__getitem__)

    def filter(self, predicate: Callable[[StreamSample], bool]) -> list[StreamSample]:
        """Return the samples for which `predicate` holds, in the order of their addition."""
        return [sample for sample in self.get_all() if predicate(sample)]

    def filter_by_difficulty(self, min_difficulty: float = 0.0, max_difficulty: float = 1.0) -> list[StreamSample]:
        """Return the samples whose difficulty lies within the bounds."""
        return self.filter(
            lambda one: one.difficulty is not None and min_difficulty <= one.difficulty <= max_difficulty
        )

    def filter_by_success(self, success: bool) -> list[StreamSample]:
        """Return the samples with this outcome."""
        return self.filter(lambda one: one.success is success)

    def filter_by_source(self, source: SampleSource) -> list[StreamSample]:
        """Return the samples from this source."""
        return self.filter(lambda one: one.source == source)

    def snapshot(self) -> BufferSnapshot:
        """Return the samples held now, in the order of their addition."""
        with self._lock:
            slots = self._by_age()
            return BufferSnapshot.model_construct(
                samples=tuple(self._samples[slot] for slot in slots),
                serials=tuple(self._serials[slot] for slot in slots),
                timestamp=utc_now(),
                total_added=self.total_added,
                total_evicted=self.total_evicted,
            )

    # --- adding and evicting ---------------------------------------------------------------------------------------

    def add(self, sample: StreamSample, priority: float | None = None) -> None:
        """Add a sample; `priority` defaults to the sample's own if it was set, otherwise to `default_priority`.

        A sample whose id is already held is added to it and does not replace it.
        """
        if priority is None:
            own = "priority" in sample.model_fields_set
            priority = sample.priority if own else self.config.default_priority
        weight = self._weight(priority)
        with self._lock:
            if self.is_full:
                slot = self._evicted()
                self._samples[slot], self._serials[slot] = sample, self.total_added
            else:
                slot = self.size
                self._samples.append(sample)
                self._serials.append(self.total_added)
                self._priorities.append(priority)
            self._slots_of.setdefault(sample.sample_id, []).append(slot)
            self._weights.set(slot, weight)
            self._set_priority(slot, priority)
            self.total_added += 1

    def add_batch(self, samples: Iterable[StreamSample], priorities: Sequence[float] | None = None) -> None:
        """Add samples in order."""
        chosen = list(samples)
        given: Sequence[float | None] = [None] * len(chosen) if priorities is None else priorities
        if len(given) != len(chosen):
            raise UsageError(f"{len(chosen)} samples but {len(given)} priorities; give one for each sample")
        for sample, priority in zip(chosen, given, strict=True):
            self.add(sample, priority)

    def clear(self) -> None:
        """Remove everything; the totals of added and evicted samples continue."""
        with self._lock:
            self.total_evicted += self.size
            self._empty()

    def _evicted(self) -> int:
        """Choose a sample by the policy, forget it, and return its slot."""
        policy = self.config.eviction_policy
        if policy is BufferEvictionPolicy.RANDOM:
            slot = int(self._rng.random() * self.size)  # 8 times as fast as integers()
        elif policy is BufferEvictionPolicy.FIFO:
            slot = self._oldest
            self._oldest = (slot + 1) % self.size
        else:
            while True:
                priority, serial, slot = heapq.heappop(self._lowest)
                if (self._priorities[slot], self._serials[slot]) == (priority, serial):
                    break
        slots = self._slots_of[self._samples[slot].sample_id]
        slots.remove(slot)
        if not slots:
            del self._slots_of[self._samples[slot].sample_id]
        self.total_evicted += 1
        return slot

    # --- drawing ---------------------------------------------------------------------------------------------------

    def sample(
        self, n: int, *, min_difficulty: float | None = None, max_difficulty: float | None = None
    ) -> list[StreamSample]:
        """Draw `n` samples with replacement, in proportion to priority^alpha, marked as replays.

        With bounds, draw only samples whose difficulty is known and within them. When all priorities are 0, draw
        uniformly. Raises UsageError below `min_samples_before_sampling` samples, or with none within the bounds.
        """
        with self._lock:
            self._check_ready(n)
            if min_difficulty is not None or max_difficulty is not None:
                slots = self._slots_within(n, min_difficulty or 0.0, 1.0 if max_difficulty is None else max_difficulty)
            elif self._weights.total > 0 and self.config.priority_alpha > 0:
                slots = self._weights.find(self._rng.random(n) * self._weights.total)
            else:
                slots = self._rng.integers(self.size, size=n)
            return self._replays(slots)

    def sample_uniform(self, n: int) -> list[StreamSample]:
        """Draw up to `n` different samples, each with the same probability, marked as replays."""
        with self._lock:
            self._check_ready(n)
            return self._replays(self._rng.choice(self.size, size=min(n, self.size), replace=False))

    def _check_ready(self, n: int) -> None:
        if n < 1:
            raise UsageError(f"cannot draw {n} samples; draw at least 1")
        if not self.can_sample:
            needed = self.config.min_samples_before_sampling
            raise UsageError(f"the replay buffer holds {self.size} samples; add samples until it holds {needed}")

    def _slots_within(self, n: int, low: float, high: float) -> NDArray[np.int64]:
        known = ((slot, one.difficulty) for slot, one in enumerate(self._samples))
        slots = np.array([slot for slot, value in known if value is not None and low <= value <= high], np.int64)
        if not len(slots):
            raise UsageError(f"the replay buffer holds no sample of difficulty {low} to {high}; use wider bounds")
        weights = self._weights[slots]
        return self._rng.choice(slots, size=n, p=weights / weights.sum() if weights.sum() > 0 else None)

    def _replays(self, slots: NDArray[np.int64]) -> list[StreamSample]:
        return [self._samples[slot].with_replay() for slot in slots.tolist()]

    # --- priorities ------------------------------------------------------------------------------------------------

    def _weight(self, priority: float) -> float:
        if not (isfinite(priority) and priority >= 0):
            raise UsageError(f"priority {priority} is not valid; use a finite number from 0")
        return float(priority**self.config.priority_alpha)

    def _set_priority(self, slot: int, priority: float) -> None:
        self._priorities[slot] = priority
        if self.config.eviction_policy is BufferEvictionPolicy.PRIORITY:
            heapq.heappush(self._lowest, (priority, self._serials[slot], slot))
            if len(self._lowest) > 2 * self.size + 64:
                self._order_lowest()

    def _order_lowest(self) -> None:
        # A sorted list is a heap.
        self._lowest = sorted(zip(self._priorities, self._serials, range(self.size), strict=True))

    def update_priority(self, sample_id: str, priority: float) -> bool:
        """Set the priority of all samples of an id; return whether there is one."""
        weight = self._weight(priority)
        with self._lock:
            slots = self._slots_of.get(sample_id, [])
            for slot in slots:
                self._weights.set(slot, weight)
                self._set_priority(slot, priority)
            return bool(slots)

    def update_priorities_by_reward(self, alpha: float = 0.1) -> None:
        """Move the priority of every sample with a reward by `alpha` towards max(0, reward + 1)."""
        with self._lock:
            for slot, sample in enumerate(self._samples):
                if sample.reward is not None:
                    old = self._priorities[slot]
                    self._priorities[slot] = (1 - alpha) * old + alpha * max(0.0, sample.reward + 1.0)
            self._weigh_all()

    def _weigh_all(self) -> None:
        """Compute weights and order of eviction from the priorities."""
        weights = np.array(self._priorities, np.float64) ** self.config.priority_alpha
        self._weights.update(np.arange(self.size), weights)
        self._order_lowest()

    # --- files -----------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain JSON types, slot by slot; `from_dict` returns an equal buffer."""
        with self._lock:
            return {
                "version": VERSION,
                "config": self.config.model_dump(mode="json"),
                "total_added": self.total_added,
                "total_evicted": self.total_evicted,
                "rng_state": json.dumps(self._rng.bit_generator.state),  # as text: its integers have 128 bits
                "oldest": self._oldest,
                "priorities": list(self._priorities),
                "serials": list(self._serials),
                "samples": [sample.model_dump(mode="json") for sample in self._samples],
            }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return the buffer of `to_dict`; raise UsageError for one of another version or with missing parts."""
        if data.get("version") != VERSION:
            raise UsageError(f"the replay buffer has version {data.get('version')!r}; use one of version {VERSION}")
        buffer = cls(ReplayBufferConfig.model_validate(data["config"]))
        buffer._samples = [StreamSample.model_validate(fields) for fields in data["samples"]]
        buffer._serials, buffer._priorities = list(data["serials"]), list(data["priorities"])
        if not len(buffer._samples) == len(buffer._serials) == len(buffer._priorities):
            raise UsageError("the columns of the replay buffer have different lengths; save it again")
        for slot in buffer._by_age():
            buffer._slots_of.setdefault(buffer._samples[slot].sample_id, []).append(slot)
        buffer._weigh_all()
        buffer._oldest = int(data["oldest"])
        buffer.total_added, buffer.total_evicted = int(data["total_added"]), int(data["total_evicted"])
        buffer._rng.bit_generator.state = json.loads(data["rng_state"])
        return buffer

    def save(self, path: str | Path) -> None:
        """Write the buffer to a file, as JSON with a checksum."""
        write_checked_json(path, self.to_dict())

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a buffer; raise UsageError, with the name, for a damaged file."""
        return cls.from_dict(read_checked_json(path))
