"""What a run's own log says of its data loader: waits for data beside the times of steps.

LeRobot's terminal output    ... updt_s:0.173 data_s:0.012 ...
any run folder               two tags, one for each
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from query_mutator.analysis.runs import find_runs, load_run
from query_mutator.errors import UsageError
from query_mutator.sizing.stalls import ENOUGH

HEADROOM = 1.2
_WAITS = re.compile(r"(?:^|[/_])(data_s|data_time|dataloading_s|dataload\w*|data_wait\w*)$")
_STEPS = re.compile(r"(?:^|[/_])(updt_s|update_s|step_time|train_step_s|batch_time)$")
_NUMBER = r":\s*([0-9.]+(?:[eE][-+]?\d+)?)"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedTimes:
    """Medians of what a run logged, in seconds, and where they are from."""

    wait_s: float
    step_s: float
    workers: int | None
    source: str

    @property
    def stall(self) -> float:
        """Return the share of time that steps waited."""
        return self.wait_s / (self.wait_s + self.step_s)


def read_times(place: str, *, workers: int | None = None) -> LoggedTimes:
    """Return the times in a log file or a run folder; UsageError when there are none."""
    path = Path(place)
    if path.is_file() and (found := _from_text(path)):
        waits, steps = found
        return _times(waits, steps, workers, place)
    run = load_run(find_runs([place])[0])
    wait_tags, step_tags = ([tag for tag in run.series if pattern.search(tag)] for pattern in (_WAITS, _STEPS))
    if not (wait_tags and step_tags):
        raise UsageError(f"{place} tells no waits for data (data_s, dataloading_s) beside times of steps (updt_s)")
    known = run.config.get("num_workers")
    workers = workers if workers is not None else int(known) if isinstance(known, (int, float)) else None
    source = f"{place} {wait_tags[0]}, {step_tags[0]}"
    return _times(list(run.series[wait_tags[0]].value), list(run.series[step_tags[0]].value), workers, source)


def verdict(times: LoggedTimes) -> str:
    """Return what the times say of the number of workers."""
    seen = (
        f"steps wait {times.stall:.1%} of the time (measured: {1e3 * times.wait_s:.3g} ms for data, "
        f"{1e3 * times.step_s:.3g} ms a step)"
    )
    if times.stall <= ENOUGH:
        return f"{seen}: the workers are enough, and more cannot help; fewer may do, `qm size workers` finds out"
    if not times.workers:
        return f"{seen}: data are the limit; tell how many workers the run had with --num-workers"
    needed = math.ceil(times.workers * (times.wait_s + times.step_s) / times.step_s * HEADROOM)
    return (
        f"{seen}: data are the limit; about {needed} workers instead of {times.workers} would keep up, if processors "
        "or disks allow (estimated: as if each worker went on at the same speed)"
    )


def _times(waits: Sequence[float], steps: Sequence[float], workers: int | None, source: str) -> LoggedTimes:
    wait_s, step_s = (median([value for value in values if math.isfinite(value)] or [0.0]) for values in (waits, steps))
    if step_s <= 0:
        raise UsageError(f"{source}: the times of steps are not above 0")
    return LoggedTimes(wait_s=wait_s, step_s=step_s, workers=workers, source=source)


def _from_text(path: Path) -> tuple[list[float], list[float]] | None:
    text = path.read_text(encoding="utf-8", errors="replace")
    waits, steps = (
        [float(value) for value in re.findall(rf"\b{name}{_NUMBER}", text)] for name in ("data_s", "updt_s")
    )
    return (waits, steps) if waits and steps else None
