"""LeRobot (0.6): SmolVLA's memory from a table, command lines for `lerobot-train`, and what its log reports.

The log of a run has `updt_s` (seconds of a step), `data_s` (of waiting for data) and, on a GPU, `mem_gb`. Waiting times
of any other run come from its run folder, as two tags.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from query_mutator.errors import UsageError
from query_mutator.lab.analysis.runs import find_runs, load_run
from query_mutator.lab.sizing.cards import GIB, MIB, Fit
from query_mutator.lab.sizing.stalls import ENOUGH

__all__ = ["LoggedTimes", "Tabled", "logged_memory", "read_times", "smolvla", "train_line", "verdict"]

# --- SmolVLA ---------------------------------------------------------------------------------------------------------

#: (cameras, unfrozen) -> floor, base and slope in MiB, millions of trained parameters. AdamW, fp32 weights; measured by
#: tracking LeRobot's own SmolVLA as this package tracks its presets. Images are resized to 512 x 512 whatever the
#: camera, so the resolution changes nothing.
_SMOLVLA = {
    (2, False): (3248.0, 2479.0, 226.0, 99.88),
    (3, False): (3248.0, 2479.0, 314.0, 99.88),
    (2, True): (0.0, 4714.0, 1552.0, 392.9),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tabled:
    """A row of the table: its fit in bytes, parameters in millions, and the source of the figures."""

    name: str
    fit: Fit
    trained_m: float
    parameters_m: float = 450.05
    source: str = "from a table, by the number of cameras; not tracked here"


def smolvla(*, cameras: int = 2, unfrozen: bool = False) -> Tabled:
    """Return SmolVLA's row; UsageError for a number of cameras that the table lacks."""
    if (cameras, unfrozen) not in _SMOLVLA:
        known = " or ".join(str(count) for count, trained in _SMOLVLA if trained == unfrozen)
        raise UsageError(f"--cameras {cameras} is not in the table of smolvla; it has {known} cameras")
    floor, base, slope, trained_m = _SMOLVLA[cameras, unfrozen]
    return Tabled(
        name=f"smolvla, {cameras} cameras" + (", unfrozen" if unfrozen else ""),
        fit=Fit(floor=floor * MIB, base=base * MIB, slope=slope * MIB),
        trained_m=trained_m,
    )


# --- command lines ---------------------------------------------------------------------------------------------------


def train_line(
    *,
    policy: str = "act",
    batch_size: int,
    workers: int | None = None,
    prefetch: int = 2,
    start_method: str = "spawn",
    precision: str = "no",
    accumulate: int = 1,
) -> str:
    """Return a `lerobot-train` command with options that LeRobot has; the data set is left for the reader to name."""
    options: dict[str, object] = {
        "dataset.repo_id": "USER/DATASET",
        "policy.type": policy,
        "policy.push_to_hub": "false",
        "batch_size": batch_size,
    }
    if workers is not None:
        options["num_workers"] = workers
    if workers:
        options |= {"prefetch_factor": prefetch, "persistent_workers": "true"}
        options["dataloader_multiprocessing_context"] = start_method
    if precision != "no":
        options["accelerator.mixed_precision"] = precision
    if accumulate > 1:
        options["accelerator.gradient_accumulation.steps"] = accumulate
    return " ".join(["lerobot-train", *(f"--{name}={value}" for name, value in options.items())])


# --- logs ------------------------------------------------------------------------------------------------------------

_MOST = 1e6  # workers that a log may claim, or a verdict ask for
HEADROOM = 1.2  # more workers than the logged times ask for
_WAITS = re.compile(r"(?:^|[/_])(data_s|data_time|dataloading_s|dataload\w*|data_wait\w*)$")
_STEPS = re.compile(r"(?:^|[/_])(updt_s|update_s|step_time|train_step_s|batch_time)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedTimes:
    """Medians of the times that a run logged, in seconds."""

    wait_s: float
    step_s: float
    workers: int | None

    @property
    def stall(self) -> float:
        """Return the share of time that steps wait."""
        return self.wait_s / (self.wait_s + self.step_s)


def read_times(place: str, *, workers: int | None = None) -> LoggedTimes:
    """Return the times in a log file or a run folder; UsageError if there are none."""
    if Path(place).is_file():
        waits, steps = (_logged(Path(place), name) for name in ("data_s", "updt_s"))
        if waits and steps:
            return _times(waits, steps, workers, place)
    run = load_run(find_runs([place])[0])
    wait_tags, step_tags = ([tag for tag in run.series if pattern.search(tag)] for pattern in (_WAITS, _STEPS))
    if not (wait_tags and step_tags):
        raise UsageError(f"{place} has no waiting times (data_s, dataloading_s) with step times (updt_s)")
    known = run.config.get("num_workers")
    if workers is None and isinstance(known, (int, float)) and 0 <= known < _MOST:
        workers = int(known)
    waits, steps = (list(run.series[tags[0]].value) for tags in (wait_tags, step_tags))
    return _times(waits, steps, workers, f"{place} {step_tags[0]}")


def logged_memory(path: str) -> float:
    """Return the median `mem_gb` of a LeRobot log in bytes; UsageError if it has none."""
    try:
        found = _logged(Path(path), "mem_gb")
    except OSError as error:
        raise UsageError(f"--log {path}: {error.strerror}") from None
    if not found:
        raise UsageError(f"--log {path} has no mem_gb; LeRobot logs it when it trains on a GPU")
    return median(found) * GIB


def verdict(times: LoggedTimes) -> str:
    """Return what the times say about the number of workers."""
    seen = (
        f"steps wait {times.stall:.1%} of the time (measured: {1e3 * times.wait_s:.3g} ms for data, "
        f"{1e3 * times.step_s:.3g} ms a step)"
    )
    if times.stall <= ENOUGH:
        return f"{seen}: the workers are enough, more cannot help; `qm size workers` finds out whether fewer do"
    if not times.workers:
        return f"{seen}: data are the bottleneck; give the run's number of workers with --num-workers"
    needed = math.ceil(min(_MOST, times.workers * (times.wait_s + times.step_s) / times.step_s * HEADROOM))
    return (
        f"{seen}: data are the bottleneck; about {needed} workers instead of {times.workers} would keep up if "
        "processors and disks allow it (estimated: as if each worker kept its speed)"
    )


def _times(waits: Sequence[float], steps: Sequence[float], workers: int | None, source: str) -> LoggedTimes:
    wait_s, step_s = (median([value for value in values if math.isfinite(value)] or [0.0]) for values in (waits, steps))
    if step_s <= 0:
        raise UsageError(f"{source}: the step times are not above 0")
    return LoggedTimes(wait_s=max(0.0, wait_s), step_s=step_s, workers=workers)


def _logged(path: Path, name: str) -> list[float]:
    """Return every `name:NUMBER` of a log."""
    text = path.read_text(encoding="utf-8", errors="replace")
    return [float(value) for value in re.findall(rf"\b{name}:\s*(\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)", text)]
