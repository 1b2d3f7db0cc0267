"""Samples in slots 0..size-1, with their numbers in columns, found by addition and by id.

A removed sample is replaced by the last one. Means and filters by number read the columns only: they do not drift, and
they do not load the samples' memory.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable
from math import nan

import numpy as np

from query_mutator.batching.streaming.types import SampleSource, StreamSample
from query_mutator.errors import UsageError

__all__ = ["SampleStore"]


class ColumnMean:
    """Mean of a column over the samples held whose value is known, as an attribute; 0 without any."""

    def __init__(self, column: str) -> None:
        self._column = column

    def __get__(self, store: SampleStore, _owner: type) -> float:
        values = np.array(getattr(store, self._column))
        known = values[~np.isnan(values)]
        return float(known.mean()) if len(known) else 0.0


class SampleStore:
    """The samples a replay buffer holds, and queries over them; methods without `_` are thread-safe."""

    def __init__(self, *, track_difficulty: bool = True, track_success: bool = True) -> None:
        self._track_difficulty = track_difficulty
        self._track_success = track_success
        self._lock = threading.RLock()
        self._empty()

    def _empty(self) -> None:
        self._samples: list[StreamSample] = []
        self._replays: list[StreamSample] = []  # marked copies, made early: drawing must not copy from cold memory
        self._serials = array("q")  # number of the addition to the buffer, from 0
        self._priorities = array("d")
        self._difficulties = array("d")  # nan = unknown, here and in the next two
        self._rewards = array("d")
        self._successes = array("d")
        self._slot_of: dict[int, int] = {}  # by serial
        self._serials_of: dict[str, list[int]] = {}  # by sample id

    @property
    def size(self) -> int:
        """Number of samples held."""
        return len(self._samples)

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def is_empty(self) -> bool:
        """Return whether nothing is held."""
        return not self._samples

    mean_difficulty = ColumnMean("_difficulties")
    mean_reward = ColumnMean("_rewards")
    mean_priority = ColumnMean("_priorities")
    success_rate = ColumnMean("_successes")

    # --- queries ---------------------------------------------------------------------------------------------------

    def get_all(self) -> list[StreamSample]:
        """Return all samples in the order of their addition, not marked as replays."""
        with self._lock:
            return [self._samples[slot] for slot in self._by_age()]

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

    def get_episode(self, episode_id: str) -> list[StreamSample]:
        """Return the steps of an episode that are held, ordered by their index."""
        steps = self.filter(lambda one: one.episode_id == episode_id)
        return sorted(steps, key=lambda one: one.step_index or 0)

    def n_step_return(self, sample: StreamSample, n: int, gamma: float = 1.0) -> float:
        """Return the discounted sum of the rewards of this step and the next n - 1 of its episode that are held."""
        if sample.episode_id is None or sample.step_index is None:
            raise UsageError(f"sample {sample.sample_id!r} is not a step of an episode; use one with a step_index")
        first = sample.step_index
        later = {one.step_index: one.reward or 0.0 for one in self.get_episode(sample.episode_id)}
        return float(sum(gamma**ahead * later.get(first + ahead, 0.0) for ahead in range(n)))

    # --- slots, under the lock -------------------------------------------------------------------------------------

    def _by_age(self) -> list[int]:
        return [self._slot_of[serial] for serial in sorted(self._slot_of)]

    def _append_slot(self, sample: StreamSample) -> int:
        """Return a new last slot, to be filled by `_fill`."""
        self._samples.append(sample)
        self._replays.append(sample)
        for column in self._columns():
            column.append(0)
        return len(self._samples) - 1

    def _columns(self) -> tuple[array[int] | array[float], ...]:
        return self._serials, self._priorities, self._difficulties, self._rewards, self._successes

    def _fill(self, slot: int, sample: StreamSample, serial: int, priority: float) -> None:
        """Write a sample into a slot; its id is indexed by `_index_id`."""
        self._samples[slot] = sample
        self._replays[slot] = sample.with_replay()
        self._serials[slot] = serial
        self._priorities[slot] = priority
        difficulty, reward, success = sample.difficulty, sample.reward, sample.success
        self._difficulties[slot] = nan if difficulty is None or not self._track_difficulty else difficulty
        self._rewards[slot] = nan if reward is None else reward
        self._successes[slot] = nan if success is None or not self._track_success else success
        self._slot_of[serial] = slot

    def _index_id(self, sample_id: str, serial: int) -> None:
        self._serials_of.setdefault(sample_id, []).append(serial)

    def _forget(self, slot: int) -> None:
        """Remove a slot's sample from the indices."""
        serial = self._serials[slot]
        sample_id = self._replays[slot].sample_id  # the replay is replaced next: its memory is touched anyway
        del self._slot_of[serial]
        serials = self._serials_of[sample_id]
        serials.remove(serial)
        if not serials:
            del self._serials_of[sample_id]

    def _move_last_to(self, slot: int) -> None:
        """Move the last sample into a slot that was forgotten, and remove the last slot."""
        last = self.size - 1
        if slot != last:
            self._fill(slot, self._samples[last], self._serials[last], self._priorities[last])
        self._samples.pop()
        self._replays.pop()
        for column in self._columns():
            column.pop()
