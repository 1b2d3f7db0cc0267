"""A bounded store of stream samples that are drawn again, those of high priority more often.

No operation but looking at everything goes through the samples: adding, evicting, changing a priority and drawing
take microseconds at any size, whatever the eviction policy.
Samples lie in slots 0..size-1; a removed one is replaced by the last. Columns of numbers lie beside them, so means
and filters never drift and never touch the samples.
"""

from __future__ import annotations

import threading
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isfinite, nan
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
from query_mutator.batching.streaming.types import SampleSource, StreamSample, utc_now
from query_mutator.errors import UsageError
from query_mutator.stats.sampling import WeightedSampler

KIND = "replay buffer"
VERSION = 1


class ReplayBuffer:
    """Keeps up to `max_size` samples; threads may add and draw at the same time.

    Files hold everything, the random stream too: a restored buffer draws and evicts what this one would.
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
        self._lock = threading.RLock()
        self._empty()

    def _empty(self) -> None:
        self._samples: list[StreamSample] = []
        self._replays: list[StreamSample] = []  # the same, marked: a draw of cold memory must not copy it first
        self._serials = array("q")  # which addition it was
        self._priorities = array("d")
        self._difficulties = array("d")  # nan = none
        self._rewards = array("d")
        self._successes = array("b")  # -1 = unknown
        self._columns: tuple[array[Any], ...] = (
            *(self._serials, self._priorities, self._difficulties),
            *(self._rewards, self._successes),
        )
        self._weights = WeightedSampler()  # of priority^alpha
        self._slot_of: dict[int, int] = {}  # serial -> slot
        self._serials_of: dict[str, int | list[int]] = {}  # sample id -> its serial; all of them when there are more
        self._ages: deque[int] = deque()  # serials, oldest first; may hold some that are gone
        self._lowest = LowestFirst(self._priorities, self._serials, self._slot_of)

    # --- what it holds ---------------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Number of samples held."""
        return len(self._samples)

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def is_empty(self) -> bool:
        """Say whether nothing is held."""
        return not self._samples

    @property
    def is_full(self) -> bool:
        """Say whether the next sample replaces another."""
        return len(self._samples) >= self.config.max_size

    @property
    def can_sample(self) -> bool:
        """Say whether enough is held to draw from."""
        return len(self._samples) >= self.config.min_samples_before_sampling

    @property
    def mean_difficulty(self) -> float:
        """Mean difficulty of the samples held that have one, 0 when none has."""
        return _mean(self._difficulties)

    @property
    def mean_reward(self) -> float:
        """Mean reward of the samples held that have one, 0 when none has."""
        return _mean(self._rewards)

    @property
    def mean_priority(self) -> float:
        """Mean priority of the samples held."""
        return _mean(self._priorities)

    @property
    def success_rate(self) -> float:
        """Share of successes among the samples held whose outcome is known."""
        return _mean(array("d", [outcome for outcome in self._successes if outcome >= 0]))

    # --- adding and evicting ---------------------------------------------------------------------------------------

    def add(self, sample: StreamSample, priority: float | None = None) -> None:
        """Add a sample; without `priority` its own counts if it was given one, else `default_priority`.

        A sample whose id is here already is one more sample, not a replacement.
        """
        if priority is None:
            own = "priority" in sample.model_fields_set
            priority = sample.priority if own else self.config.default_priority
        weight = self._weight(priority)
        with self._lock:
            serial = self.total_added
            slot = self._evict() if len(self._samples) >= self._max_size else self._append_slot(sample)
            self._fill(slot, sample, serial, priority)
            self._weights.set(slot, weight)
            self._slot_of[serial] = slot
            self._note_id(sample.sample_id, serial)
            self._enqueue(serial, priority)
            self.total_added += 1
            if self._max_staleness is not None:
                self._evict_stale(self._max_staleness)

    def add_batch(self, samples: Iterable[StreamSample], priorities: Sequence[float] | None = None) -> None:
        """Add samples one after the other."""
        chosen = list(samples)
        given: Sequence[float | None] = [None] * len(chosen) if priorities is None else priorities
        if len(given) != len(chosen):
            raise UsageError(f"{len(chosen)} samples but {len(given)} priorities")
        for sample, priority in zip(chosen, given, strict=True):
            self.add(sample, priority)

    def remove(self, sample_id: str) -> int:
        """Remove all samples of an id and return how many there were."""
        with self._lock:
            serials = self._serials_with(sample_id)
            for serial in serials:
                self._drop(serial)
            return len(serials)

    def clear(self) -> None:
        """Remove everything; counts of what was added and evicted go on."""
        with self._lock:
            self.total_evicted += self.size
            self._empty()

    def _append_slot(self, sample: StreamSample) -> int:
        self._samples.append(sample)
        self._replays.append(sample)
        for column in self._columns:
            column.append(0)
        return len(self._samples) - 1

    def _fill(self, slot: int, sample: StreamSample, serial: int, priority: float) -> None:
        config = self.config
        self._samples[slot] = sample
        self._replays[slot] = sample.with_replay()
        self._serials[slot] = serial
        self._priorities[slot] = priority
        self._difficulties[slot] = (
            nan if sample.difficulty is None or not config.track_difficulty else sample.difficulty
        )
        self._rewards[slot] = nan if sample.reward is None else sample.reward
        self._successes[slot] = -1 if sample.success is None or not config.track_success else sample.success

    def _enqueue(self, serial: int, priority: float) -> None:
        if self._policy is BufferEvictionPolicy.PRIORITY:
            self._lowest.note(serial, priority)
        if self._keeps_ages:
            self._ages.append(serial)

    def _evict(self) -> int:
        """Choose a sample by the policy, forget it, and return the slot it leaves."""
        slot = self._victim()
        self._forget(slot)
        return slot

    def _victim(self) -> int:
        if self._policy is BufferEvictionPolicy.RANDOM:
            return int(self._rng.random() * self.size)  # an eighth of the time of integers()
        if self._policy is BufferEvictionPolicy.FIFO:
            while (serial := self._ages.popleft()) not in self._slot_of:
                pass
            return self._slot_of[serial]
        return self._lowest.pop()

    def _evict_stale(self, max_staleness: int) -> None:
        while self._ages and (self._ages[0] not in self._slot_of or self.total_added - self._ages[0] > max_staleness):
            serial = self._ages.popleft()
            if serial in self._slot_of:
                self._drop(serial)

    def _forget(self, slot: int) -> None:
        serial, name = self._serials[slot], self._replays[slot].sample_id  # the twin goes anyway, its memory is touched
        del self._slot_of[serial]
        serials = self._serials_of[name]
        if isinstance(serials, int):
            del self._serials_of[name]
        else:
            serials.remove(serial)
            self._serials_of[name] = serials if len(serials) > 1 else serials[0]
        self.total_evicted += 1

    def _note_id(self, name: str, serial: int) -> None:
        known = self._serials_of.setdefault(name, serial)
        if known is not serial:
            self._serials_of[name] = [known, serial] if isinstance(known, int) else [*known, serial]

    def _serials_with(self, name: str) -> list[int]:
        serials = self._serials_of.get(name, [])
        return [serials] if isinstance(serials, int) else list(serials)

    def _drop(self, serial: int) -> None:
        """Remove a sample and move the last one into its slot."""
        slot = self._slot_of[serial]
        self._forget(slot)
        last = self.size - 1
        if slot != last:
            moved = self._samples[last]
            self._fill(slot, moved, self._serials[last], self._priorities[last])
            self._weights.set(slot, self._weight(self._priorities[last]))
            self._slot_of[self._serials[last]] = slot
        self._weights.set(last, 0.0)
        self._samples.pop()
        self._replays.pop()
        for column in self._columns:
            column.pop()

    # --- drawing ---------------------------------------------------------------------------------------------------

    def sample(
        self, n: int, *, min_difficulty: float | None = None, max_difficulty: float | None = None
    ) -> list[StreamSample]:
        """Draw `n` samples with replacement, in proportion to priority^alpha, marked as replays.

        With bounds of difficulty only samples that have a difficulty within them are drawn. Too few samples for
        `min_samples_before_sampling`, or none within the bounds, is a UsageError. When all priorities are 0, all
        samples are drawn alike.
        """
        with self._lock:
            return self._take(self._slots(n, min_difficulty, max_difficulty))

    def sample_weighted(self, n: int, beta: float | None = None) -> ReplayDraw:
        """Draw as `sample` does and return importance weights (Schaul et al. 2016, section 3.4) with the samples."""
        beta = self.config.importance_beta if beta is None else beta
        with self._lock:
            slots = self._slots(n, None, None)
            total = self._weights.total
            chances = self._weights[np.array(slots)] / total if total else np.full(n, 1 / self.size)
            weights = (self.size * chances) ** -beta
            serials = np.array([self._serials[slot] for slot in slots], dtype=np.int64)
            return ReplayDraw(self._take(slots), (weights / weights.max()).astype(np.float32), chances, serials)

    def sample_uniform(self, n: int) -> list[StreamSample]:
        """Draw up to `n` different samples, all with the same chance, marked as replays."""
        with self._lock:
            self._check_ready(n)
            return self._take(self._rng.choice(self.size, size=min(n, self.size), replace=False).tolist())

    def _check_ready(self, n: int) -> None:
        if n < 1:
            raise UsageError(f"{n} samples cannot be drawn")
        if not self.can_sample:
            needed = self.config.min_samples_before_sampling
            raise UsageError(f"the replay buffer holds {self.size} samples; it is drawn from when it holds {needed}")

    def _slots(self, n: int, low: float | None, high: float | None) -> list[int]:
        self._check_ready(n)
        if low is not None or high is not None:
            return self._slots_within(n, low, high)
        if self._weights.total > 0 and self._alpha > 0:
            drawn = self._weights.find(self._rng.random(n) * self._weights.total)
        else:
            drawn = self._rng.integers(self.size, size=n)
        slots: list[int] = drawn.tolist()
        return slots

    def _slots_within(self, n: int, low: float | None, high: float | None) -> list[int]:
        difficulties = np.array(self._difficulties)
        inside = ~np.isnan(difficulties)
        inside &= difficulties >= (-np.inf if low is None else low)
        inside &= difficulties <= (np.inf if high is None else high)
        slots = np.flatnonzero(inside)
        if not len(slots):
            raise UsageError(f"no sample of difficulty {low} to {high} is in the replay buffer")
        weights = np.array(self._priorities)[slots] ** self._alpha
        chances = weights / weights.sum() if weights.sum() > 0 else None
        drawn: list[int] = self._rng.choice(slots, size=n, p=chances).tolist()
        return drawn

    def _take(self, slots: list[int]) -> list[StreamSample]:
        replays = self._replays
        return [replays[slot] for slot in slots]

    # --- looking in ------------------------------------------------------------------------------------------------

    def get_all(self) -> list[StreamSample]:
        """Return all samples in the order they were added, not marked as replays."""
        with self._lock:
            return [self._samples[slot] for slot in self._by_age()]

    def _by_age(self) -> list[int]:
        return [self._slot_of[serial] for serial in sorted(self._slot_of)]

    def snapshot(self) -> BufferSnapshot:
        """Return what is held now."""
        with self._lock:
            slots = self._by_age()
            return BufferSnapshot.model_construct(
                samples=tuple(self._samples[slot] for slot in slots),
                serials=tuple(self._serials[slot] for slot in slots),
                timestamp=utc_now(),
                total_added=self.total_added,
                total_evicted=self.total_evicted,
            )

    def filter(self, predicate: Callable[[StreamSample], bool]) -> list[StreamSample]:
        """Return the samples for which `predicate` holds, in the order they were added."""
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

    def get_episode(self, episode_id: str) -> list[StreamSample]:
        """Return the steps of an episode that are held, in the order of their index."""
        steps = self.filter(lambda one: one.episode_id == episode_id)
        return sorted(steps, key=lambda one: one.step_index or 0)

    def n_step_return(self, sample: StreamSample, n: int, gamma: float = 1.0) -> float:
        """Return the discounted sum of the rewards of this step and the next n - 1 of its episode that are held."""
        if sample.episode_id is None or sample.step_index is None:
            raise UsageError(f"sample {sample.sample_id!r} is no step of an episode")
        first = sample.step_index
        later = {one.step_index: one.reward or 0.0 for one in self.get_episode(sample.episode_id)}
        return float(sum(gamma**ahead * later.get(first + ahead, 0.0) for ahead in range(n)))

    # --- priorities ------------------------------------------------------------------------------------------------

    def _weight(self, priority: float) -> float:
        if not (isfinite(priority) and priority >= 0):
            raise UsageError(f"a priority is a number from 0 up, not {priority}")
        return float(priority**self._alpha)

    def update_priority(self, sample_id: str, priority: float) -> bool:
        """Set the priority of all samples of an id; say whether there is one."""
        with self._lock:
            serials = self._serials_with(sample_id)
            for serial in serials:
                self._set_priority(serial, priority)
            return bool(serials)

    def update_priorities(self, serials: Sequence[int] | NDArray[np.int64], priorities: Sequence[float]) -> int:
        """Set the priorities of what `sample_weighted` drew; what has been evicted since is left out.

        Returns how many were set.
        """
        with self._lock:
            pairs = [(int(one), priority) for one, priority in zip(serials, priorities, strict=True)]
            held = [(serial, float(priority)) for serial, priority in pairs if serial in self._slot_of]
            for serial, priority in held:
                self._set_priority(serial, priority)
            return len(held)

    def _set_priority(self, serial: int, priority: float) -> None:
        slot, weight = self._slot_of[serial], self._weight(priority)
        self._priorities[slot] = priority
        self._weights.set(slot, weight)
        if self._policy is BufferEvictionPolicy.PRIORITY:
            self._lowest.note(serial, priority)

    def update_priorities_by_reward(self, alpha: float = 0.1) -> None:
        """Move the priority of every sample with a reward by `alpha` towards max(0, reward + 1)."""
        with self._lock:
            rewards, old = np.array(self._rewards), np.array(self._priorities)
            new = np.where(np.isnan(rewards), old, (1 - alpha) * old + alpha * np.maximum(0.0, rewards + 1.0))
            self._priorities[:] = array("d", new.tobytes())
            self._weights.update(np.arange(self.size), new**self._alpha)
            self._lowest.choose()

    # --- files -----------------------------------------------------------------------------------------------------

    def _settings(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "config": self.config.model_dump(mode="json"),
            "total_added": self.total_added,
            "total_evicted": self.total_evicted,
            "rng_state": self._rng.bit_generator.state,
        }

    def _state_columns(self) -> dict[str, array[Any]]:
        return {"priorities": self._priorities, "serials": self._serials}

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain JSON types, slot by slot: a restored buffer goes on as this one would."""
        with self._lock:
            columns = self._state_columns()
            samples = [sample.model_dump(mode="json") for sample in self._samples]
            return {**self._settings(), **{name: one.tolist() for name, one in columns.items()}, "samples": samples}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return the buffer of `to_dict`."""
        return cls._restore(data, data, [StreamSample.model_validate(fields) for fields in data["samples"]])

    @classmethod
    def _restore(cls, state: Mapping[str, Any], lists: Mapping[str, Any], samples: Sequence[StreamSample]) -> Self:
        if state.get("version") != VERSION:
            raise UsageError(f"a replay buffer of version {state.get('version')!r}; {VERSION} is read here")
        buffer = cls(ReplayBufferConfig.model_validate(state["config"]))
        columns = (samples, lists["serials"], lists["priorities"])
        if len({len(column) for column in columns}) > 1:
            raise UsageError("the columns of a replay buffer have different lengths")
        for slot, (sample, serial, priority) in enumerate(zip(*columns, strict=True)):
            buffer._append_slot(sample)
            buffer._fill(slot, sample, serial, priority)
            buffer._slot_of[serial] = slot
        for serial in sorted(buffer._slot_of):
            buffer._note_id(samples[buffer._slot_of[serial]].sample_id, serial)
            if buffer._keeps_ages:
                buffer._ages.append(serial)
        weights = np.array([buffer._weight(priority) for priority in lists["priorities"]])
        buffer._weights.update(np.arange(len(weights)), weights)
        buffer._lowest.choose()
        buffer.total_added, buffer.total_evicted = int(state["total_added"]), int(state["total_evicted"])
        buffer._rng.bit_generator.state = state["rng_state"]
        return buffer

    def save(self, path: str | Path) -> None:
        """Write the buffer by rename: `.json` as text, anything else as a compact binary file."""
        if is_text(path):
            write_checked_json(path, self.to_dict())
            return
        with self._lock:
            columns = self._state_columns()
            arrays = {name: np.array(one) for name, one in columns.items()}
            write_samples(path, self._samples, kind=KIND, meta=self._settings(), arrays=arrays)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a buffer; a damaged file is a BatchFileError that names it."""
        if is_text(path):
            return cls.from_dict(read_checked_json(path))
        samples, file = read_samples(path, kind=KIND)
        lists = {name: file.arrays[name].tolist() for name in ("priorities", "serials")}
        return cls._restore(file.meta, lists, samples)


def _mean(column: array[float]) -> float:
    values = np.array(column)
    known = values[~np.isnan(values)] if len(values) else values
    return float(known.mean()) if len(known) else 0.0
