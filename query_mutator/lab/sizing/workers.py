"""Number of worker processes for a data loader: items are timed one by one, and the workers simulated as a queue.

    k batch    W workers    P batches ahead per worker

Worker k mod W makes batch k; it starts when its last batch is done and batch k - W P has been taken. Batches are taken
in order. The log of a run says whether its steps really wait.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from query_mutator.cli.console import table
from query_mutator.errors import UsageError
from query_mutator.lab.sizing.machine import MIB, Budget
from query_mutator.lab.sizing.sizes import train_line

__all__ = ["Advice", "Predicted", "Profile", "advice_text", "advise", "log_verdict"]

ENOUGH = 0.05  # share of the time that steps may wait
PREFETCHES = (2, 4, 8)
MOST_WORKERS = 64
_BATCHES = 2000  # simulated
_COMPUTES, _WAITS = 0.7, 0.3  # shares of processor time
_NEAR_BEST = 0.95  # of the fastest, when data are the bottleneck
_SHARE_OF_MEMORY = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The cost of items when nothing else runs."""

    item_s: list[float]
    collate_s: float
    step_s: float  # of the function that --step names
    batch_size: int
    batch_bytes: int
    cpu_share: float  # share of processor time in the items' time: 1 computes, 0 waits

    @property
    def bound(self) -> str:
        """Return what items do with their time: computing, waiting, or both."""
        return "computing" if self.cpu_share >= _COMPUTES else "waiting" if self.cpu_share <= _WAITS else "both"

    def batch_times(self) -> list[float]:
        """Return the seconds that batches take to make, with items drawn from those measured."""
        rng = random.Random(0)
        return [sum(rng.choices(self.item_s, k=self.batch_size)) + self.collate_s for _ in range(_BATCHES)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """Prediction of the queue for a number of workers, with batches ahead of each."""

    workers: int
    prefetch: int
    stall: float  # share of the time that steps wait
    samples_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """The smallest number of workers that is enough or, if none is, the smallest that is nearly the fastest."""

    chosen: Predicted
    tried: list[Predicted]
    most: int  # workers that the budget allows
    limited_by: str
    profile: Profile
    step_s: float

    @property
    def enough(self) -> bool:
        """Return whether steps wait at most ENOUGH of the time."""
        return self.chosen.stall <= ENOUGH


def advise(profile: Profile, budget: Budget, *, step_s: float) -> Advice:
    """Return the smallest number of workers whose steps of `step_s` hardly wait, batches ahead before workers."""
    batch_s, (most, limited_by) = profile.batch_times(), _most_workers(profile, budget)
    tried: list[Predicted] = []
    for workers in range(most + 1):
        for prefetch in PREFETCHES if workers else PREFETCHES[:1]:
            slowed = max(1.0, workers * profile.cpu_share / budget.cpus)  # busy workers share the processors
            wait_s = predicted_wait(
                [slowed * made for made in batch_s], workers=workers, prefetch=prefetch, step_s=step_s
            )
            whole_s = max(1e-9, wait_s + step_s)
            rate = profile.batch_size / whole_s
            tried.append(Predicted(workers=workers, prefetch=prefetch, stall=wait_s / whole_s, samples_per_s=rate))
        enough = [one for one in tried if one.stall <= ENOUGH]
        if enough:
            break
    fastest = max(one.samples_per_s for one in tried)
    near = [one for one in tried if one.samples_per_s >= _NEAR_BEST * fastest]
    return Advice(
        chosen=(enough or near)[0], tried=tried, most=most, limited_by=limited_by, profile=profile, step_s=step_s
    )


def predicted_wait(batch_s: Sequence[float], *, workers: int, prefetch: int, step_s: float) -> float:
    """Return the seconds that a step of `step_s` waits on average for a batch, made in `batch_s`."""
    if workers == 0:
        return sum(batch_s) / max(1, len(batch_s))
    ahead, waited, now = workers * prefetch, 0.0, 0.0
    done, taken = [0.0] * workers, [0.0] * len(batch_s)
    for k, seconds in enumerate(batch_s):
        begins = max(done[k % workers], taken[k - ahead] if k >= ahead else 0.0)
        done[k % workers] = begins + seconds
        if k >= 2 * ahead:  # the queue starts empty, which is not its steady state
            waited += max(0.0, done[k % workers] - now)
        taken[k] = max(now, done[k % workers])
        now = taken[k] + step_s
    return waited / max(1, len(batch_s) - 2 * ahead)


def _most_workers(profile: Profile, budget: Budget) -> tuple[int, str]:
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

#: What items do -> what follows for workers, and what to do where no number of them is enough
_WORDS = {
    "computing": (
        "they compute, so workers help up to the number of processors",
        "make items cheaper (smaller images, faster decoding, a cache of decoded items)",
    ),
    "waiting": (
        "they wait, so workers help beyond the number of processors",
        "bring data nearer (local disk, larger files, a cache in memory)",
    ),
    "both": ("they compute and wait", "make items cheaper, or bring data nearer"),
}


def advice_text(advice: Advice) -> str:
    """Return what items cost, the prediction by workers, the number to use, and lines to use it."""
    profile, best = advice.profile, advice.chosen
    times = sorted(profile.item_s)
    mean, p95 = sum(times) / len(times), times[int(0.95 * (len(times) - 1))]
    rows = [
        (str(one.workers), str(one.prefetch) if one.workers else "", f"{one.stall:.1%}", f"{one.samples_per_s:,.0f}")
        for one in advice.tried
    ]
    helps, cure = _WORDS[profile.bound]
    ahead = f" prefetch_factor={best.prefetch}" if best.workers else ""
    lines = [
        f"items: {1e3 * mean:.3g} ms each, 95 % within {1e3 * p95:.3g} ms, the longest {1e3 * times[-1]:.3g} ms; "
        f"processor time {profile.cpu_share:.0%}: {helps}",
        f"a batch of {profile.batch_size}: {1e3 * (mean * profile.batch_size + profile.collate_s):.3g} ms to make, "
        f"{profile.batch_bytes / MIB:.3g} MiB; a step takes {1e3 * advice.step_s:.3g} ms",
        table("simulated from the items' times", ("workers", "ahead", "steps wait", "samples/s"), rows),
        f"num_workers={best.workers}{ahead}: steps wait {best.stall:.1%} of the time (simulated, without the transfer "
        "of batches from the workers; --from-logs says what a run really waits)",
    ]
    if not advice.step_s:
        lines.append("no step time was given: this is the smallest number that loads nearly as fast as any")
    elif not advice.enough:
        limit = f"{advice.limited_by} allow no more than {advice.most}"
        faster = f"up to {1 / max(0.01, 1 - best.stall):.2g} times as fast"
        lines.append(f"no number of workers is enough, and {limit}: {cure}; {faster}")
    more = f", prefetch_factor={best.prefetch}, persistent_workers=True" if best.workers else ""
    lines.append(f"DataLoader(..., batch_size={profile.batch_size}, num_workers={best.workers}{more})")
    return "\n".join([*lines, train_line(batch_size=profile.batch_size, workers=best.workers, prefetch=best.prefetch)])


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
        number = r"(\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)"
        waits, steps = ([*map(float, re.findall(rf"\b{name}:\s*{number}", text))] for name in ("data_s", "updt_s"))
        if waits and steps:
            return waits, steps, None
    run = load_run(find_runs([place])[0])
    wait_tag, step_tag = (next(filter(tags.search, run.series), "") for tags in (_WAIT_TAGS, _STEP_TAGS))
    if not (wait_tag and step_tag):
        raise UsageError(f"{place} has no waiting times (data_s, dataloading_s) with step times (updt_s)")
    known = run.config.get("num_workers")
    workers = int(known) if isinstance(known, (int, float)) and 0 <= known < _MOST else None
    return run.series[wait_tag].value.tolist(), run.series[step_tag].value.tolist(), workers
