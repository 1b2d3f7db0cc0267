"""How many worker processes a data loader needs: measured, beginning with what a model of the queue predicts.

item times, read one by one   ->  a queue worked through by hand  ->  where to begin
trials in processes of their own, at the real time of a step      ->  the smallest number that is enough
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from query_mutator.errors import UsageError
from query_mutator.sizing.budget import Budget
from query_mutator.sizing.child import run_child
from query_mutator.sizing.loading import Loaded, LoadTrial, Profile
from query_mutator.sizing.stalls import ENOUGH, PREFETCHES, batch_times, predicted_stall

MOST_WORKERS = 64
_COMPUTES, _WAITS = 0.7, 0.3  # shares of processor time
_NEAR_BEST = 0.95  # of the fastest, when data are the limit
_SHARE_OF_MEMORY = 0.8
_REPEATS = 3  # of a trial that says otherwise than the queue worked by hand

Measure = Callable[[LoadTrial], Loaded]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A number of workers that was tried."""

    workers: int
    prefetch: int
    start_method: str
    loaded: Loaded
    predicted: float
    handover_s: float = 0.0  # that a step waits for a batch which is ready

    @property
    def enough(self) -> bool:
        """Return whether steps wait for data for at most ENOUGH of the time; what cannot be told, the queue decides."""
        return self.by_queue if self.hidden else self.loaded.stall <= ENOUGH

    @property
    def by_queue(self) -> bool:
        """Return what the queue worked by hand says of that."""
        return self.predicted <= ENOUGH

    @property
    def hidden(self) -> bool:
        """Return whether the handing over alone makes the difference, as on a machine that others keep busy."""
        return self.for_data <= ENOUGH < self.loaded.stall

    @property
    def for_data(self) -> float:
        """Return the share of time that steps wait, without the handing over: no number of workers changes that."""
        return _without(self.loaded.stall, self.loaded.step_s, self.handover_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersAdvice:
    """The smallest number of workers that is enough, or, where none is, the smallest that is nearly the fastest."""

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
    complete: bool = True  # False when time was up before the search was over
    seconds: float = 0.0

    @property
    def keeps_up(self) -> bool:
        """Return whether by the items' times alone steps would not wait."""
        return self.chosen.predicted <= ENOUGH

    @property
    def chosen(self) -> Tried:
        """Return the trial that the advice rests on."""
        return next(t for t in self.tried if (t.workers, t.prefetch) == (self.workers, self.prefetch))


def run_trial(trial: LoadTrial) -> dict[str, Any]:
    """Return what a trial found in a process of its own; UsageError when it fails."""
    how = "reading items" if trial.workers is None else f"loading with {trial.workers} workers"
    return run_child("query_mutator.sizing.loading", asdict(trial), what=f"{how} of {trial.source}")


def profile_items(trial: LoadTrial) -> Profile:
    """Return what items cost, read one by one in a process of its own."""
    return Profile(**run_trial(replace(trial, workers=None)))


def load_in_child(trial: LoadTrial) -> Loaded:
    """Return what loading with workers gives, in a process of its own."""
    return Loaded(**run_trial(trial))


class Tuner:
    """Tries numbers of workers until the smallest that is enough is known, or time is up."""

    def __init__(
        self,
        trial: LoadTrial,
        profile: Profile,
        budget: Budget,
        *,
        start_methods: Sequence[str],
        time_s: float,
        began: float | None = None,
        measure: Measure = load_in_child,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.trial, self.profile, self.budget = trial, profile, budget
        self.start_methods, self.measure, self.say = start_methods, measure, say
        self.began, self.time_s = time.monotonic() if began is None else began, time_s
        self.step_s = profile.step_s if trial.step else trial.step_s
        self.batch_s = batch_times(profile.item_s, batch_size=profile.batch_size, collate_s=profile.collate_s)
        self.most, self.limited_by = most_workers(profile, budget)
        self.tried: list[Tried] = []
        self.handovers_s: list[float] = []
        self._longest_s, self._trials = 0.0, 0

    def advice(self) -> WorkersAdvice:
        """Return the smallest number of workers that is enough."""
        self._hand_over()
        self._search()
        best, complete = self._best(), self._time_left()
        if best.workers:
            self._start_methods(best)
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

    def predicted(self, workers: int, prefetch: int) -> float:
        """Return the stall that the model of the queue expects."""
        return predicted_stall(
            self.batch_s,
            workers=workers,
            prefetch=prefetch,
            step_s=self.step_s,
            cpus=self.budget.cpus,
            cpu_share=self.profile.cpu_share,
        )

    def _search(self) -> None:
        """Go up from what is predicted until it is enough, then down until it is not."""
        workers = next((w for w in range(self.most + 1) if self._promising(w)), self.most)
        while not self._enough(workers) and workers < self.most and self._time_left() and self._still_gains(workers):
            fastest = max(t.loaded.samples_per_s for t in self.tried if t.workers == workers)
            wanted = self.profile.batch_size / self.step_s if self.step_s else math.inf
            ahead = math.ceil(workers * min(2.0, wanted / fastest)) if workers else 1
            workers = min(self.most, max(workers + 1, ahead))
        while workers > 0 and self._time_left() and self._enough_or_as_fast(workers - 1):
            workers -= 1

    def _promising(self, workers: int) -> bool:
        return any(self.predicted(workers, prefetch) <= ENOUGH for prefetch in PREFETCHES[: 1 if not workers else None])

    def _enough(self, workers: int) -> bool:
        """Return whether a number of workers is enough with any number of batches ahead worth a trial."""
        for prefetch in PREFETCHES if workers else PREFETCHES[:1]:
            more_helps = prefetch == PREFETCHES[0] or self.predicted(workers, prefetch) <= 2 * ENOUGH
            if more_helps and self._time_left() and self._try(workers, prefetch).enough:
                return True
        return False

    def _enough_or_as_fast(self, workers: int) -> bool:
        fastest = max(t.loaded.samples_per_s for t in self.tried)
        if self._enough(workers):
            return True
        here = max((t.loaded.samples_per_s for t in self.tried if t.workers == workers), default=0.0)
        return not any(t.enough for t in self.tried) and here >= _NEAR_BEST * fastest

    def _still_gains(self, workers: int) -> bool:
        """Return whether more workers can be faster: beyond the processors those that compute cannot."""
        by_count = {t.workers: t.loaded.samples_per_s for t in sorted(self.tried, key=lambda t: t.loaded.samples_per_s)}
        counts = sorted(by_count)
        if len(counts) < 2 or counts[-1] != workers:
            return True
        return by_count[counts[-1]] > 1.05 * by_count[counts[-2]]

    def _try(self, workers: int, prefetch: int, start_method: str | None = None) -> Tried:
        method = start_method or self.start_methods[0]
        for known in self.tried:
            if (known.workers, known.prefetch, known.start_method) == (workers, prefetch, method):
                return known
        began = time.monotonic()
        tried = self._measured(workers, prefetch, method)
        self._longest_s = max(self._longest_s, time.monotonic() - began)
        while (
            tried.enough != tried.by_queue
            and len(tried.loaded.stalls) < _REPEATS * self.trial.windows
            and self._time_left()
        ):
            self._hand_over()
            tried = _together(tried, self._measured(workers, prefetch, method), handover_s=self.handover_s)
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
            batch_size=self.profile.batch_size,
            first=self._trials * 997 + len(self.profile.item_s),
        )
        return Tried(
            workers=workers,
            prefetch=prefetch,
            start_method=method,
            loaded=self.measure(trial),
            predicted=self.predicted(workers, prefetch),
            handover_s=self.handover_s if workers else 0.0,
        )

    @property
    def handover_s(self) -> float:
        """Return the seconds that a step waits for a batch that is ready, at the slowest."""
        return max(self.handovers_s, default=0.0)

    def _hand_over(self) -> None:
        """Measure what the handing over takes now; without a step nothing is compared to it."""
        if self.step_s:
            trial = replace(self.trial, workers=1, ready=True, start_method=self.start_methods[0])
            self.handovers_s.append(self.measure(replace(trial, batch_size=self.profile.batch_size)).wait_s)

    def _best(self) -> Tried:
        enough = [t for t in self.tried if t.enough]
        if enough:
            return min(enough, key=lambda t: (t.workers, t.prefetch))
        fastest = max(t.loaded.samples_per_s for t in self.tried)
        near = [t for t in self.tried if t.loaded.samples_per_s >= _NEAR_BEST * fastest]
        return min(near, key=lambda t: (t.workers, t.prefetch))

    def _start_methods(self, best: Tried) -> None:
        for method in self.start_methods[1:]:
            if self._time_left():
                try:
                    self._try(best.workers, best.prefetch, method)
                except UsageError as error:  # what a data set holds may not be sent to a process started afresh
                    self.say(f"{method}: {error}")

    def _time_left(self) -> bool:
        return not self.tried or time.monotonic() - self.began + self._longest_s < self.time_s


def _without(stall: float, step_s: float, handover_s: float) -> float:
    """Return the share of time that steps wait when each waits so much less."""
    waited = max(0.0, step_s * stall / max(1e-9, 1 - stall) - handover_s)
    return waited / (waited + step_s) if waited else 0.0


def _together(tried: Tried, more: Tried, *, handover_s: float) -> Tried:
    """Return two trials of the same as one."""
    old, new = tried.loaded, more.loaded
    share = len(old.stalls) / (len(old.stalls) + len(new.stalls))
    loaded = replace(
        new,
        stalls=[*old.stalls, *new.stalls],
        samples_per_s=share * old.samples_per_s + (1 - share) * new.samples_per_s,
        waits_s=[*old.waits_s, *new.waits_s],
    )
    return replace(more, loaded=loaded, handover_s=handover_s if tried.workers else 0.0)


def most_workers(profile: Profile, budget: Budget) -> tuple[int, str]:
    """Return how many workers the budget allows, and what limits them."""
    limits = {"the number tried at most": MOST_WORKERS}
    if profile.cpu_share > _WAITS:
        limits["processors"] = max(1, math.ceil(budget.cpus / max(profile.cpu_share, 0.1)))
    ahead = PREFETCHES[0] * max(1, profile.batch_bytes)
    if budget.shm_bytes is not None:
        limits["shared memory for batches"] = int(_SHARE_OF_MEMORY * budget.shm_bytes) // ahead
    if budget.memory_bytes is not None:
        worker = 256 * 2**20 + ahead  # an interpreter with PyTorch in it, started afresh
        limits["memory"] = int(_SHARE_OF_MEMORY * budget.memory_bytes) // worker
    name = min(limits, key=lambda name: limits[name])
    return max(0, limits[name]), name


def bound_of(cpu_share: float) -> str:
    """Return what items do with their time: computing, waiting, or both."""
    return "computing" if cpu_share >= _COMPUTES else "waiting" if cpu_share <= _WAITS else "both"
