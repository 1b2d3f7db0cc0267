"""One trial of loading data in a child process (loading_child.py): its settings, and its results.

wait    from requesting a batch until it arrives
step    what training does with it: a pause of a given length, or a function called with the batch
stall   wait / (wait + step)
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from query_mutator.lab.sizing.child import run_child

__all__ = ["LoadTrial", "Loaded", "Profile", "load_in_child", "profile_items", "run_trial"]


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
    size: int | None  # items of the data set


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
        return self.step_s * self.stall / (1 - self.stall)


def run_trial(trial: LoadTrial) -> dict[str, Any]:
    """Return the result of a trial in a child process; UsageError if it fails."""
    how = "reading items" if trial.workers is None else f"loading with {trial.workers} workers"
    return run_child("query_mutator.lab.sizing.loading_child:run", asdict(trial), what=f"{how} of {trial.source}")


def profile_items(trial: LoadTrial) -> Profile:
    """Return the cost of items, read one by one in a child process."""
    return Profile(**run_trial(replace(trial, workers=None)))


def load_in_child(trial: LoadTrial) -> Loaded:
    """Return the measurements of loading with workers, in a child process."""
    return Loaded(**run_trial(trial))
