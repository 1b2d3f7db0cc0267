"""A bounded store of stream samples that are drawn again, those of high priority more often.

Adding, evicting, changing a priority and drawing take microseconds at any size, whatever the eviction policy: none of
them iterates over the samples.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from query_mutator.batching.files import is_text, read_checked_json, write_checked_json
from query_mutator.batching.streaming.lowest_first import LowestFirst
from query_mutator.batching.streaming.replay_types import (
    BufferEvictionPolicy,
    BufferSnapshot,
    ReplayBufferConfig,
    ReplayDraw,
)
from query_mutator.batching.streaming.sample_columns import read_samples, write_samples
from query_mutator.batching.streaming.sample_store import SampleStore
from query_mutator.batching.streaming.types import StreamSample, utc_now
from query_mutator.errors import UsageError
from query_mutator.stats.sampling import WeightedSampler

__all__ = ["ReplayBuffer"]

KIND = "replay buffer"
VERSION = 1


class ReplayBuffer(SampleStore):
    """Keep up to `max_size` samples; threads may add and draw at the same time.

    Files include the state of the random stream: a restored buffer draws and evicts what this one would.
    """

    def __init__(self, config: ReplayBufferConfig | None = None) -> None:
        self.config = config or ReplayBufferConfig()
        self.total_added = 0
        self.total_evicted = 0
        self._policy = self.config.eviction_policy
        self._alpha = self.config.priority_alpha
        self._max_size = self.config.max_size
        self._max_staleness = self.config.max_staleness
        self._keeps_ages = self._policy is BufferEvictionPolicy.FIFO or self._max_staleness is not None
        self._rng = np.random.default_rng(self.config.seed)
        super().__init__(track_difficulty=self.config.track_difficulty, track_success=self.config.track_success)

    def _empty(self) -> None:
        super()._empty()
        self._weights = WeightedSampler()  # of priority^alpha
        self._ages: deque[int] = deque()  # serials, oldest first; may contain removed ones
        self._lowest = LowestFirst(self._priorities, self._serials, self._slot_of)

    @property
    def is_full(self) -> bool:
        """Return whether the next sample replaces another."""
        return self.size >= self._max_size

    @property
    def can_sample(self) -> bool:
        """Return whether the buffer holds enough samples to draw from."""
        return self.size >= self.config.min_samples_before_sampling

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
            serial = self.total_added
            slot = self._evict() if len(self._samples) >= self._max_size else self._append_slot(sample)
            self._fill(slot, sample, serial, priority)
            self._index_id(sample.sample_id, serial)
            self._weights.set(slot, weight)
            if self._policy is BufferEvictionPolicy.PRIORITY:
                self._lowest.note(serial, priority)
            if self._keeps_ages:
                self._ages.append(serial)
            self.total_added += 1
            if self._max_staleness is not None:
                self._evict_stale(self._max_staleness)

    def add_batch(self, samples: Iterable[StreamSample], priorities: Sequence[float] | None = None) -> None:
        """Add samples in order."""
        chosen = list(samples)
        given: Sequence[float | None] = [None] * len(chosen) if priorities is None else priorities
        if len(given) != len(chosen):
            raise UsageError(f"{len(chosen)} samples but {len(given)} priorities; give one for each sample")
        for sample, priority in zip(chosen, given, strict=True):
            self.add(sample, priority)

    def remove(self, sample_id: str) -> int:
        """Remove all samples of an id and return their number."""
        with self._lock:
            serials = list(self._serials_of.get(sample_id, ()))
            for serial in serials:
                self._drop(serial)
            return len(serials)

    def clear(self) -> None:
        """Remove everything; the totals of added and evicted samples continue."""
        with self._lock:
            self.total_evicted += self.size
            self._empty()

    def _evict(self) -> int:
        """Choose a sample by the policy, forget it, and return the slot it leaves."""
        if self._policy is BufferEvictionPolicy.RANDOM:
            slot = int(self._rng.random() * self.size)  # 8 times as fast as integers()
        elif self._policy is BufferEvictionPolicy.FIFO:
            while (serial := self._ages.popleft()) not in self._slot_of:
                pass
            slot = self._slot_of[serial]
        else:
            slot = self._lowest.pop()
        self._forget(slot)
        self.total_evicted += 1
        return slot

    def _evict_stale(self, max_staleness: int) -> None:
        while self._ages and (self._ages[0] not in self._slot_of or self.total_added - self._ages[0] > max_staleness):
            serial = self._ages.popleft()
            if serial in self._slot_of:
                self._drop(serial)

    def _drop(self, serial: int) -> None:
        slot, last = self._slot_of[serial], self.size - 1
        self._forget(slot)
        self._weights.set(slot, self._weight(self._priorities[last]))
        self._weights.set(last, 0.0)
        self._move_last_to(slot)
        self.total_evicted += 1

    # --- drawing ---------------------------------------------------------------------------------------------------

    def sample(
        self, n: int, *, min_difficulty: float | None = None, max_difficulty: float | None = None
    ) -> list[StreamSample]:
        """Draw `n` samples with replacement, in proportion to priority^alpha, marked as replays.

        With bounds, draw only samples whose difficulty is known and within them. When all priorities are 0, draw
        uniformly. Raises UsageError below `min_samples_before_sampling` samples, or with none within the bounds.
        """
        with self._lock:
            return self._take(self._slots(n, min_difficulty, max_difficulty))

    def sample_weighted(self, n: int, beta: float | None = None) -> ReplayDraw:
        """Draw as `sample` does and return importance weights (Schaul et al. 2016, section 3.4) with the samples."""
        beta = self.config.importance_beta if beta is None else beta
        with self._lock:
            slots = self._slots(n, None, None)
            total = self._weights.total
            chances = self._weights[slots] / total if total else np.full(n, 1 / self.size)
            weights = (self.size * chances) ** -beta
            serials = np.frombuffer(self._serials, np.int64)[slots]
            return ReplayDraw(self._take(slots), (weights / weights.max()).astype(np.float32), chances, serials)

    def sample_uniform(self, n: int) -> list[StreamSample]:
        """Draw up to `n` different samples, each with the same probability, marked as replays."""
        with self._lock:
            self._check_ready(n)
            return self._take(self._rng.choice(self.size, size=min(n, self.size), replace=False))

    def _check_ready(self, n: int) -> None:
        if n < 1:
            raise UsageError(f"cannot draw {n} samples; draw at least 1")
        if not self.can_sample:
            needed = self.config.min_samples_before_sampling
            raise UsageError(f"the replay buffer holds {self.size} samples; add samples until it holds {needed}")

    def _slots(self, n: int, low: float | None, high: float | None) -> NDArray[np.int64]:
        self._check_ready(n)
        if low is not None or high is not None:
            return self._slots_within(n, -np.inf if low is None else low, np.inf if high is None else high)
        if self._weights.total > 0 and self._alpha > 0:
            return self._weights.find(self._rng.random(n) * self._weights.total)
        return self._rng.integers(self.size, size=n)

    def _slots_within(self, n: int, low: float, high: float) -> NDArray[np.int64]:
        difficulties = np.array(self._difficulties)
        slots = np.flatnonzero((difficulties >= low) & (difficulties <= high))  # nan is outside any bounds
        if not len(slots):
            raise UsageError(f"the replay buffer holds no sample of difficulty {low} to {high}; use wider bounds")
        weights = np.array(self._priorities)[slots] ** self._alpha
        return self._rng.choice(slots, size=n, p=weights / weights.sum() if weights.sum() > 0 else None)

    def _take(self, slots: NDArray[np.int64]) -> list[StreamSample]:
        replays = self._replays
        return [replays[slot] for slot in slots.tolist()]

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

    # --- priorities ------------------------------------------------------------------------------------------------

    def _weight(self, priority: float) -> float:
        if not (isfinite(priority) and priority >= 0):
            raise UsageError(f"priority {priority} is not valid; use a finite number from 0")
        return float(priority**self._alpha)

    def update_priority(self, sample_id: str, priority: float) -> bool:
        """Set the priority of all samples of an id; return whether there is one."""
        with self._lock:
            serials = self._serials_of.get(sample_id, ())
            return self.update_priorities(serials, [priority] * len(serials)) > 0

    def update_priorities(self, serials: Sequence[int] | NDArray[np.int64], priorities: Sequence[float]) -> int:
        """Set the priorities of samples that `sample_weighted` drew, except those evicted since; return how many."""
        count = 0
        with self._lock:
            for serial, priority in list(zip(serials, priorities, strict=True)):
                slot = self._slot_of.get(int(serial))
                if slot is not None:
                    self._weights.set(slot, self._weight(priority))
                    self._priorities[slot] = priority
                    if self._policy is BufferEvictionPolicy.PRIORITY:
                        self._lowest.note(int(serial), float(priority))
                    count += 1
        return count

    def update_priorities_by_reward(self, alpha: float = 0.1) -> None:
        """Move the priority of every sample with a reward by `alpha` towards max(0, reward + 1)."""
        with self._lock:
            rewards, old = np.array(self._rewards), np.array(self._priorities)
            new = np.where(np.isnan(rewards), old, (1 - alpha) * old + alpha * np.maximum(0.0, rewards + 1.0))
            self._priorities[:] = array("d", new.tobytes())
            self._weights.update(np.arange(self.size), new**self._alpha)
            if self._policy is BufferEvictionPolicy.PRIORITY:
                self._lowest.choose()

    # --- files -----------------------------------------------------------------------------------------------------

    def _state(self) -> tuple[dict[str, Any], dict[str, array[Any]]]:
        """Return settings as plain JSON types, and the columns from which everything else follows."""
        settings = {
            "version": VERSION,
            "config": self.config.model_dump(mode="json"),
            "total_added": self.total_added,
            "total_evicted": self.total_evicted,
            "rng_state": self._rng.bit_generator.state,
        }
        return settings, {"priorities": self._priorities, "serials": self._serials}

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain JSON types, slot by slot; `from_dict` returns an equal buffer."""
        with self._lock:
            settings, columns = self._state()
            samples = [sample.model_dump(mode="json") for sample in self._samples]
            return {**settings, **{name: one.tolist() for name, one in columns.items()}, "samples": samples}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return the buffer of `to_dict`."""
        return cls._restore(data, data, [StreamSample.model_validate(fields) for fields in data["samples"]])

    @classmethod
    def _restore(cls, state: Mapping[str, Any], lists: Mapping[str, Any], samples: Sequence[StreamSample]) -> Self:
        if state.get("version") != VERSION:
            raise UsageError(f"the replay buffer has version {state.get('version')!r}; use one of version {VERSION}")
        if not len(samples) == len(lists["serials"]) == len(lists["priorities"]):
            raise UsageError("the columns of the replay buffer have different lengths; save it again")
        buffer = cls(ReplayBufferConfig.model_validate(state["config"]))
        # 1. the slots
        for sample, serial, priority in zip(samples, lists["serials"], lists["priorities"], strict=True):
            slot = buffer._append_slot(sample)
            buffer._fill(slot, sample, serial, priority)
            buffer._weights.set(slot, buffer._weight(priority))
        # 2. indices and orders, which follow from the serials
        for serial in sorted(buffer._slot_of):
            buffer._index_id(samples[buffer._slot_of[serial]].sample_id, serial)
            if buffer._keeps_ages:
                buffer._ages.append(serial)
        if buffer._policy is BufferEvictionPolicy.PRIORITY:
            buffer._lowest.choose()
        # 3. totals and the random stream
        buffer.total_added, buffer.total_evicted = int(state["total_added"]), int(state["total_evicted"])
        buffer._rng.bit_generator.state = state["rng_state"]
        return buffer

    def save(self, path: str | Path) -> None:
        """Write the buffer to a file: `.json` as text, any other suffix as a compact binary file."""
        if is_text(path):
            write_checked_json(path, self.to_dict())
            return
        with self._lock:
            settings, columns = self._state()
            arrays = {name: np.array(one) for name, one in columns.items()}
            write_samples(path, self._samples, kind=KIND, meta=settings, arrays=arrays)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a buffer; raise BatchFileError, with the name, for a damaged file."""
        if is_text(path):
            return cls.from_dict(read_checked_json(path))
        samples, file = read_samples(path, kind=KIND)
        lists = {name: file.arrays[name].tolist() for name in ("priorities", "serials")}
        return cls._restore(file.meta, lists, samples)
