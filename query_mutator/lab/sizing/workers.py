"""Search for the number of worker processes that a data loader needs, starting at what a simulated queue predicts.

item times, read one by one   ->  a simulated queue (stalls.py)            ->  where to start
trials in child processes, at the real time of a step                      ->  the smallest number that is enough
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from query_mutator.errors import UsageError
from query_mutator.lab.sizing.budget import Budget
from query_mutator.lab.sizing.loading import Loaded, LoadTrial, Profile, load_in_child
from query_mutator.lab.sizing.stalls import ENOUGH, PREFETCHES, batch_times, predicted_stall

__all__ = ["Tried", "Tuner", "WorkersAdvice", "bound_of", "most_workers"]

MOST_WORKERS = 64
_COMPUTES, _WAITS = 0.7, 0.3  # shares of processor time
_NEAR_BEST = 0.95  # of the fastest, when data are the bottleneck
_SHARE_OF_MEMORY = 0.8
_REPEATS = 3  # of a trial that contradicts the simulated queue


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A number of workers, what loading with it measured, and the stall that the simulated queue predicts."""

    workers: int
    prefetch: int
    start_method: str
    loaded: Loaded
    predicted: float
    handover_s: float = 0.0  # that a step waits for a batch that is ready

    @property
    def enough(self) -> bool:
        """Return whether steps wait at most ENOUGH of the time; if the transfer hides it, the prediction decides."""
        return self.by_queue if self.hidden else self.loaded.stall <= ENOUGH

    @property
    def by_queue(self) -> bool:
        """Return whether the prediction is at most ENOUGH."""
        return self.predicted <= ENOUGH

    @property
    def hidden(self) -> bool:
        """Return whether the transfer from the worker alone makes the difference, as on a busy machine."""
        return self.for_data <= ENOUGH < self.loaded.stall

    @property
    def for_data(self) -> float:
        """Return the share of time that steps wait without the transfer, which no number of workers changes."""
        step_s = self.loaded.step_s
        waited = max(0.0, step_s * self.loaded.stall / max(1e-9, 1 - self.loaded.stall) - self.handover_s)
        return waited / (waited + step_s) if waited else 0.0

    def repeated(self, more: Tried) -> Tried:
        """Return this trial and a repetition of it as one."""
        old, new = self.loaded, more.loaded
        share = len(old.stalls) / (len(old.stalls) + len(new.stalls))
        rate = share * old.samples_per_s + (1 - share) * new.samples_per_s
        return replace(more, loaded=replace(new, stalls=[*old.stalls, *new.stalls], samples_per_s=rate))


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersAdvice:
    """The smallest number of workers that is enough or, if none is, the smallest that is nearly the fastest."""

    workers: int
    prefetch: int
    start_method: str
    enough: bool
    bound: str  # computing | waiting | both
    most: int  # workers that the budget allows
    limited_by: str
    profile: Profile
    step_s: float
    handover_s: float = 0.0
    tried: list[Tried] = field(default_factory=list)
    complete: bool = True  # False if time ran out before the search was over
    seconds: float = 0.0

    @property
    def chosen(self) -> Tried:
        """Return the trial behind the advice."""
        return next(t for t in self.tried if (t.workers, t.prefetch) == (self.workers, self.prefetch))


class Tuner:
    """Tries numbers of workers until the smallest that is enough is known, or time runs out."""

    def __init__(
        self,
        trial: LoadTrial,
        profile: Profile,
        budget: Budget,
        *,
        start_methods: Sequence[str],
        time_s: float,
        began: float | None = None,
        measure: Callable[[LoadTrial], Loaded] = load_in_child,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.trial = replace(trial, batch_size=profile.batch_size)
        self.profile, self.budget = profile, budget
        self.start_methods, self.measure, self.say = start_methods, measure, say
        self.began, self.time_s = time.monotonic() if began is None else began, time_s
        self.step_s = profile.step_s if trial.step else trial.step_s
        self.batch_s = batch_times(profile.item_s, batch_size=profile.batch_size, collate_s=profile.collate_s)
        self.most, self.limited_by = most_workers(profile, budget)
        self.tried: list[Tried] = []
        self.handover_s = 0.0  # the slowest so far
        self._longest_s, self._trials = 0.0, 0

    def advice(self) -> WorkersAdvice:
        """Return the smallest number of workers that is enough."""
        self._measure_handover()
        self._search()
        best, complete = self._best(), self._time_left()
        if best.workers:
            self._try_start_methods(best)
        return WorkersAdvice(
            workers=best.workers,
            prefetch=best.prefetch,
            start_method=best.start_method,
            enough=best.enough,
            bound=bound_of(self.profile.cpu_share),
            most=self.most,
            limited_by=self.limited_by,
            profile=self.profile,
            step_s=self.step_s,
            handover_s=self.handover_s,
            tried=self.tried,
            complete=complete,
            seconds=time.monotonic() - self.began,
        )

    def _search(self) -> None:
        """Go up from the prediction until it is enough, then down until it is not."""
        workers = next((w for w in range(self.most + 1) if self._promising(w)), self.most)
        while not self._enough(workers) and workers < self.most and self._time_left() and self._still_gains(workers):
            wanted = self.profile.batch_size / self.step_s if self.step_s else math.inf
            ahead = math.ceil(workers * min(2.0, wanted / self._fastest(workers))) if workers else 1
            workers = min(self.most, max(workers + 1, ahead))
        while workers > 0 and self._time_left() and self._enough_or_as_fast(workers - 1):
            workers -= 1

    def _promising(self, workers: int) -> bool:
        return any(self._predicted(workers, prefetch) <= ENOUGH for prefetch in _prefetches(workers))

    def _enough(self, workers: int) -> bool:
        """Return whether a number of workers is enough with any number of batches ahead that is worth a trial."""
        for prefetch in _prefetches(workers):
            more_helps = prefetch == PREFETCHES[0] or self._predicted(workers, prefetch) <= 2 * ENOUGH
            if more_helps and self._time_left() and self._try(workers, prefetch).enough:
                return True
        return False

    def _enough_or_as_fast(self, workers: int) -> bool:
        fastest = self._fastest()
        if self._enough(workers):
            return True
        return not any(t.enough for t in self.tried) and self._fastest(workers) >= _NEAR_BEST * fastest

    def _still_gains(self, workers: int) -> bool:
        """Return whether more workers can be faster; those that compute cannot beyond the number of processors."""
        fewer = [t.workers for t in self.tried if t.workers < workers]
        if not fewer or workers != max(t.workers for t in self.tried):
            return True
        return self._fastest(workers) > 1.05 * self._fastest(max(fewer))

    def _fastest(self, workers: int | None = None) -> float:
        """Return the most samples per second of the trials, or of those with a number of workers; 0 without any."""
        return max((t.loaded.samples_per_s for t in self.tried if workers in (None, t.workers)), default=0.0)

    def _try(self, workers: int, prefetch: int, start_method: str | None = None) -> Tried:
        method = start_method or self.start_methods[0]
        for known in self.tried:
            if (known.workers, known.prefetch, known.start_method) == (workers, prefetch, method):
                return known
        began = time.monotonic()
        tried = self._measured(workers, prefetch, method)
        self._longest_s = max(self._longest_s, time.monotonic() - began)
        most = _REPEATS * self.trial.windows
        while tried.enough != tried.by_queue and len(tried.loaded.stalls) < most and self._time_left():
            self._measure_handover()
            tried = tried.repeated(self._measured(workers, prefetch, method))
        self.tried.append(tried)
        self.say(f"num_workers={workers} prefetch_factor={prefetch}: steps wait {tried.loaded.stall:.1%} of the time")
        return tried

    def _measured(self, workers: int, prefetch: int, method: str) -> Tried:
        self._trials += 1
        trial = replace(
            self.trial,
            workers=workers,
            prefetch=prefetch,
            start_method=method if workers else None,
            first=self._trials * 997 + len(self.profile.item_s),  # items that no trial has read: not in the page cache
        )
        return Tried(
            workers=workers,
            prefetch=prefetch,
            start_method=method,
            loaded=self.measure(trial),
            predicted=self._predicted(workers, prefetch),
            handover_s=self.handover_s if workers else 0.0,
        )

    def _predicted(self, workers: int, prefetch: int) -> float:
        return predicted_stall(
            self.batch_s,
            workers=workers,
            prefetch=prefetch,
            step_s=self.step_s,
            cpus=self.budget.cpus,
            cpu_share=self.profile.cpu_share,
        )

    def _measure_handover(self) -> None:
        """Measure what the transfer of a ready batch takes now; without a step nothing is compared with it."""
        if self.step_s:
            trial = replace(self.trial, workers=1, ready=True, start_method=self.start_methods[0])
            self.handover_s = max(self.handover_s, self.measure(trial).wait_s)

    def _best(self) -> Tried:
        fastest = self._fastest()
        near = [t for t in self.tried if t.loaded.samples_per_s >= _NEAR_BEST * fastest]
        return min([t for t in self.tried if t.enough] or near, key=lambda t: (t.workers, t.prefetch))

    def _try_start_methods(self, best: Tried) -> None:
        for method in self.start_methods[1:]:
            if self._time_left():
                try:
                    self._try(best.workers, best.prefetch, method)
                except UsageError as error:  # a data set may hold what cannot be pickled for a spawned process
                    self.say(f"{method}: {error}")

    def _time_left(self) -> bool:
        return not self.tried or time.monotonic() - self.began + self._longest_s < self.time_s


def _prefetches(workers: int) -> tuple[int, ...]:
    """Return the numbers of batches ahead to try; without workers there is one."""
    return PREFETCHES if workers else PREFETCHES[:1]


def most_workers(profile: Profile, budget: Budget) -> tuple[int, str]:
    """Return how many workers the budget allows, and what limits them."""
    limits = {"the largest number tried": MOST_WORKERS}
    if profile.cpu_share > _WAITS:
        limits["processors"] = max(1, math.ceil(budget.cpus / max(profile.cpu_share, 0.1)))
    ahead = PREFETCHES[0] * max(1, profile.batch_bytes)
    if budget.shm_bytes is not None:
        limits["shared memory for batches"] = int(_SHARE_OF_MEMORY * budget.shm_bytes) // ahead
    if budget.memory_bytes is not None:
        worker = 256 * 2**20 + ahead  # an interpreter with PyTorch, started by spawn
        limits["memory"] = int(_SHARE_OF_MEMORY * budget.memory_bytes) // worker
    name = min(limits, key=lambda name: limits[name])
    return max(0, limits[name]), name


def bound_of(cpu_share: float) -> str:
    """Return what items do with their time: computing, waiting, or both."""
    return "computing" if cpu_share >= _COMPUTES else "waiting" if cpu_share <= _WAITS else "both"
