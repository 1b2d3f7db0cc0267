"""How many worker processes a data loader needs: a simulated queue says where to start, trials decide.

    k batch    W workers    P batches ahead per worker

In the queue worker k mod W makes batch k; it starts when its last batch is done and batch k - W P has been taken.
Batches are taken in order. A log of a run gives a verdict without trials.
"""

from __future__ import annotations

import math
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from query_mutator.cli.console import table
from query_mutator.errors import UsageError
from query_mutator.lab.sizing.machine import MIB, Budget, run_child
from query_mutator.lab.sizing.sizes import train_line

__all__ = [
    "Advice", "LoadTrial", "Loaded", "Profile", "Tried", "Tuner", "advice_text", "batch_times", "log_verdict",
    "predicted_stall", "run_trial",
]  # fmt: skip

ENOUGH = 0.05  # share of the time that steps may wait
PREFETCHES = (2, 4, 8)
MOST_WORKERS = 64
_BATCHES = 2000  # simulated
_COMPUTES, _WAITS = 0.7, 0.3  # shares of processor time
_NEAR_BEST = 0.95  # of the fastest, when data are the bottleneck
_SHARE_OF_MEMORY = 0.8
_REPEATS = 3  # of a trial that contradicts the simulated queue


# --- the queue --------------------------------------------------------------------------------------------------------


def batch_times(item_s: Sequence[float], *, batch_size: int, collate_s: float = 0.0) -> list[float]:
    """Return the seconds that batches take to make, with items drawn from those measured."""
    rng = random.Random(0)
    return [sum(rng.choices(item_s, k=batch_size)) + collate_s for _ in range(_BATCHES)]


def predicted_stall(
    batch_s: Sequence[float],
    *,
    workers: int,
    prefetch: int,
    step_s: float,
    cpus: float = math.inf,
    cpu_share: float = 0.0,
) -> float:
    """Return the share of time that steps of `step_s` wait; more than `cpus` busy workers slow each other down."""
    if workers == 0:
        made = sum(batch_s) / max(1, len(batch_s))
        return made / (made + step_s) if made + step_s else 0.0
    slowed = max(1.0, workers * cpu_share / cpus)
    ahead, waited, now = workers * prefetch, 0.0, 0.0
    done, taken = [0.0] * workers, [0.0] * len(batch_s)
    for k, seconds in enumerate(batch_s):
        begins = max(done[k % workers], taken[k - ahead] if k >= ahead else 0.0)
        done[k % workers] = begins + slowed * seconds
        if k >= 2 * ahead:  # the queue starts empty, which is not its steady state
            waited += max(0.0, done[k % workers] - now)
        taken[k] = max(now, done[k % workers])
        now = taken[k] + step_s
    steps = max(1, len(batch_s) - 2 * ahead) * step_s
    return waited / (waited + steps) if waited + steps else 0.0


# --- trials -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTrial:
    """What to try; with `workers` None items are read one by one in the process itself."""

    source: str
    batch_size: int | None = None
    workers: int | None = None
    prefetch: int = 2
    start_method: str | None = None
    step_s: float = 0.0
    step: str | None = None  # package.module:function, called with a batch in place of waiting step_s
    window_s: float = 1.5
    windows: int = 3
    first: int = 0  # item at which reading begins
    ready: bool = False  # send one ready batch again and again: measures the transfer alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The cost of items when nothing else runs."""

    item_s: list[float]
    collate_s: float
    step_s: float
    batch_size: int
    batch_bytes: int
    cpu_share: float  # share of processor time in the items' time: 1 computes, 0 waits

    @property
    def bound(self) -> str:
        """Return what items do with their time: computing, waiting, or both."""
        return "computing" if self.cpu_share >= _COMPUTES else "waiting" if self.cpu_share <= _WAITS else "both"


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """Measurements of loading with workers; stalls are by window."""

    stalls: list[float]
    samples_per_s: float
    step_s: float
    wait_p95_s: float
    startup_s: float
    worker_bytes: int  # of all workers together; shared pages are divided among them

    @property
    def stall(self) -> float:
        """Return the median share of time that steps wait."""
        return median(self.stalls)

    @property
    def wait_s(self) -> float:
        """Return the seconds that a step waits, in the median window."""
        return self.step_s * self.stall / max(1e-9, 1 - self.stall)


def run_trial(trial: LoadTrial) -> dict[str, Any]:
    """Return the fields of a Profile or a Loaded, measured in a child process; UsageError if it fails."""
    how = "reading items" if trial.workers is None else f"loading with {trial.workers} workers"
    return run_child("query_mutator.lab.sizing.loading:run", asdict(trial), what=f"{how} of {trial.source}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A number of workers, what loading with it measured, and the stall that the simulated queue predicts."""

    workers: int
    prefetch: int
    loaded: Loaded
    predicted: float
    handover_s: float = 0.0  # that a step waits for a batch that is ready

    @property
    def enough(self) -> bool:
        """Return whether steps wait at most ENOUGH of the time; if only the transfer exceeds it, the queue decides."""
        return self.loaded.stall <= ENOUGH or (self.for_data <= ENOUGH and self.predicted <= ENOUGH)

    @property
    def for_data(self) -> float:
        """Return the share of time that steps wait without the transfer, which no number of workers changes."""
        waited = max(0.0, self.loaded.wait_s - self.handover_s)
        return waited / (waited + self.loaded.step_s) if waited else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """The smallest number of workers that is enough or, if none is, the smallest that is nearly the fastest."""

    workers: int
    prefetch: int
    start_method: str
    enough: bool
    most: int  # workers that the budget allows
    limited_by: str
    profile: Profile
    step_s: float
    handover_s: float = 0.0
    tried: list[Tried] = field(default_factory=list)
    complete: bool = True  # False if time ran out before the search was over

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
        time_s: float,
        measure: Callable[[LoadTrial], Loaded] = lambda trial: Loaded(**run_trial(trial)),
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.trial = replace(trial, batch_size=profile.batch_size)
        self.profile, self.budget, self.measure, self.say = profile, budget, measure, say
        self.ends, self._longest_s = time.monotonic() + time_s, 0.0
        self.step_s = profile.step_s if trial.step else trial.step_s
        self.batch_s = batch_times(profile.item_s, batch_size=profile.batch_size, collate_s=profile.collate_s)
        self.most, self.limited_by = most_workers(profile, budget)
        self.tried: list[Tried] = []
        self.handover_s = 0.0  # the slowest so far

    def advice(self) -> Advice:
        """Return the smallest number of workers that is enough."""
        self._measure_handover()
        self._search()
        near = [t for t in self.tried if t.loaded.samples_per_s >= _NEAR_BEST * self._fastest()]
        best = min([t for t in self.tried if t.enough] or near, key=lambda t: (t.workers, t.prefetch))
        return Advice(
            workers=best.workers,
            prefetch=best.prefetch,
            start_method=self.trial.start_method or "",
            enough=best.enough,
            most=self.most,
            limited_by=self.limited_by,
            profile=self.profile,
            step_s=self.step_s,
            handover_s=self.handover_s,
            tried=self.tried,
            complete=self._time_left(),
        )

    def _search(self) -> None:
        """Go up from the prediction until it is enough, then down until it is not."""
        promising = (w for w in range(self.most + 1) if any(self._predicted(w, p) <= ENOUGH for p in _prefetches(w)))
        workers = next(promising, self.most)
        while not self._enough(workers) and workers < self.most and self._time_left() and self._still_gains(workers):
            wanted = self.profile.batch_size / self.step_s if self.step_s else math.inf
            ahead = math.ceil(workers * min(2.0, wanted / self._fastest(workers))) if workers else 1
            workers = min(self.most, max(workers + 1, ahead))
        while workers > 0 and self._time_left() and self._enough_or_as_fast(workers - 1):
            workers -= 1

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
        return not fewer or self._fastest(workers) > 1.05 * self._fastest(max(fewer))

    def _fastest(self, workers: int | None = None) -> float:
        """Return the most samples per second of the trials, or of those with a number of workers; 0 without any."""
        return max((t.loaded.samples_per_s for t in self.tried if workers in (None, t.workers)), default=0.0)

    def _try(self, workers: int, prefetch: int) -> Tried:
        for known in self.tried:
            if (known.workers, known.prefetch) == (workers, prefetch):
                return known
        began = time.monotonic()
        tried = self._measured(workers, prefetch)
        self._longest_s = max(self._longest_s, time.monotonic() - began)
        repeats = 1
        while tried.enough != (tried.predicted <= ENOUGH) and repeats < _REPEATS and self._time_left():
            self._measure_handover()
            again = self._measured(workers, prefetch)
            stalls = [*tried.loaded.stalls, *again.loaded.stalls]
            tried, repeats = replace(again, loaded=replace(again.loaded, stalls=stalls)), repeats + 1
        self.tried.append(tried)
        self.say(f"num_workers={workers} prefetch_factor={prefetch}: steps wait {tried.loaded.stall:.1%} of the time")
        return tried

    def _measured(self, workers: int, prefetch: int) -> Tried:
        first = 997 * (len(self.tried) + 1) + len(self.profile.item_s)  # items that are not in the page cache
        method = self.trial.start_method if workers else None
        loaded = self.measure(replace(self.trial, workers=workers, prefetch=prefetch, start_method=method, first=first))
        return Tried(
            workers=workers,
            prefetch=prefetch,
            loaded=loaded,
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
            self.handover_s = max(self.handover_s, self.measure(replace(self.trial, workers=1, ready=True)).wait_s)

    def _time_left(self) -> bool:
        return not self.tried or time.monotonic() + self._longest_s < self.ends


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
        worker = 256 * MIB + ahead  # an interpreter with PyTorch, started by spawn
        limits["memory"] = int(_SHARE_OF_MEMORY * budget.memory_bytes) // worker
    name = min(limits, key=lambda name: limits[name])
    return max(0, limits[name]), name


# --- words ------------------------------------------------------------------------------------------------------------

_HELPS = {
    "computing": "they compute, so workers help up to the number of processors",
    "waiting": "they wait, so workers help beyond the number of processors",
    "both": "they compute and wait",
}
_CURES = {
    "computing": "make items cheaper (smaller images, faster decoding, a cache of decoded items)",
    "waiting": "bring data nearer (local disk, larger files, a cache in memory)",
    "both": "make items cheaper, or bring data nearer",
}


def advice_text(advice: Advice) -> str:
    """Return what items cost, the trials, the number of workers with the reasons for it, and lines to use it."""
    profile, best = advice.profile, advice.chosen
    times = sorted(profile.item_s)
    mean, p95 = sum(times) / len(times), times[int(0.95 * (len(times) - 1))]
    ahead = f" prefetch_factor={best.prefetch}" if best.workers else ""
    lines = [
        f"items: {1e3 * mean:.3g} ms each, 95 % within {1e3 * p95:.3g} ms, the longest {1e3 * times[-1]:.3g} ms; "
        f"processor time {profile.cpu_share:.0%}: {_HELPS[profile.bound]}",
        f"a batch of {profile.batch_size}: {1e3 * (mean * profile.batch_size + profile.collate_s):.3g} ms to make, "
        f"{profile.batch_bytes / MIB:.3g} MiB; a step takes {1e3 * advice.step_s:.3g} ms, "
        f"and waits {1e3 * advice.handover_s:.2g} ms for a batch that is ready",
        _trials_table(advice.tried),
        f"num_workers={best.workers}{ahead}: steps wait {best.loaded.stall:.1%} of the time (measured), "
        f"{best.for_data:.1%} without the transfer from workers",
    ]
    if not advice.enough:
        lines.append(_data_bound(advice))
    more = ""
    if best.workers:
        more = f", prefetch_factor={best.prefetch}, persistent_workers=True"
        more += f', multiprocessing_context="{advice.start_method}"'
    size, workers = profile.batch_size, best.workers
    lines.append(f"DataLoader(..., batch_size={size}, num_workers={workers}{more})")
    line = train_line(batch_size=size, workers=workers, prefetch=best.prefetch, start_method=advice.start_method)
    return "\n".join([*lines, line])


def _trials_table(tried: Sequence[Tried]) -> str:
    rows = [
        (
            str(t.workers),
            str(t.prefetch) if t.workers else "",
            *(f"{share:.1%}" for share in (t.loaded.stall, t.for_data, t.predicted)),
            f"{1e3 * t.loaded.wait_p95_s:.1f}",
            f"{t.loaded.samples_per_s:,.0f}",
            f"{t.loaded.startup_s:.2f}",
            f"{t.loaded.worker_bytes / MIB:,.0f}",
        )
        for t in sorted(tried, key=lambda t: (t.workers, t.prefetch))
    ]
    header = ("workers", "ahead", "wait", "for data", "predicted", "p95 ms", "samples/s", "first s", "MiB")
    title = "wait: share of the time that steps wait; for data: without the transfer; MiB: of all workers together"
    return table(title, header, rows)


def _data_bound(advice: Advice) -> str:
    """Return why no number of workers is enough, and what to do."""
    if not advice.step_s:
        return "no step time was given: this is the smallest number that loads nearly as fast as any"
    if not advice.complete:
        return "time ran out before enough workers were found: give more with --time-s"
    if advice.chosen.predicted <= ENOUGH:
        return (
            "from the items' times alone steps would not wait: the rest is the transfer of batches, or other programs "
            "on this machine; try larger batches, or a quiet machine"
        )
    limit = f", and {advice.limited_by} allow no more than {advice.most}" if advice.workers == advice.most else ""
    faster = f"; up to {1 / max(0.01, 1 - advice.chosen.loaded.stall):.2g} times as fast"
    return f"no number of workers is enough{limit}: {_CURES[advice.profile.bound]}{faster}"


# --- logs -------------------------------------------------------------------------------------------------------------

_MOST = 1e6  # workers that a log may claim, or a verdict ask for
_HEADROOM = 1.2  # more workers than the logged times ask for
_WAIT_TAGS = re.compile(r"(?:^|[/_])(data_s|data_time|dataloading_s|dataload\w*|data_wait\w*)$")
_STEP_TAGS = re.compile(r"(?:^|[/_])(updt_s|update_s|step_time|train_step_s|batch_time)$")


def log_verdict(place: str, *, workers: int | None = None) -> str:
    """Return what the times in a LeRobot log or a run folder say about the workers; UsageError if there are none.

    Such a log has `updt_s` (seconds of a step) and `data_s` (of waiting for data).
    """
    waits, steps, known = _logged_times(place)
    wait_s, step_s = (median([value for value in values if math.isfinite(value)] or [0.0]) for values in (waits, steps))
    if step_s <= 0:
        raise UsageError(f"{place}: the step times are not above 0")
    wait_s, workers = max(0.0, wait_s), workers if workers is not None else known
    stall = wait_s / (wait_s + step_s)
    seen = (
        f"steps wait {stall:.1%} of the time (measured: {1e3 * wait_s:.3g} ms for data, {1e3 * step_s:.3g} ms a step)"
    )
    if stall <= ENOUGH:
        return f"{seen}: the workers are enough, more cannot help; `qm size workers` finds out whether fewer do"
    if not workers:
        return f"{seen}: data are the bottleneck; give the run's number of workers with --num-workers"
    needed = math.ceil(min(_MOST, workers * (wait_s + step_s) / step_s * _HEADROOM))
    return (
        f"{seen}: data are the bottleneck; about {needed} workers instead of {workers} would keep up if "
        "processors and disks allow it (estimated: as if each worker kept its speed)"
    )


def _logged_times(place: str) -> tuple[Sequence[float], Sequence[float], int | None]:
    """Return seconds of waiting, seconds of steps, and the number of workers where it is known."""
    from query_mutator.lab.analysis.runs import find_runs, load_run

    if Path(place).is_file():
        text = Path(place).read_text(encoding="utf-8", errors="replace")
        waits, steps = ([*_numbers(text, name)] for name in ("data_s", "updt_s"))
        if waits and steps:
            return waits, steps, None
    run = load_run(find_runs([place])[0])
    wait_tag, step_tag = (next(filter(tags.search, run.series), "") for tags in (_WAIT_TAGS, _STEP_TAGS))
    if not (wait_tag and step_tag):
        raise UsageError(f"{place} has no waiting times (data_s, dataloading_s) with step times (updt_s)")
    known = run.config.get("num_workers")
    workers = int(known) if isinstance(known, (int, float)) and 0 <= known < _MOST else None
    return run.series[wait_tag].value.tolist(), run.series[step_tag].value.tolist(), workers


def _numbers(text: str, name: str) -> Iterator[float]:
    """Yield every `name:NUMBER` of a log."""
    return map(float, re.findall(rf"\b{name}:\s*(\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)", text))
