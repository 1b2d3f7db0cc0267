"""The speed-up from batching: the rows of `benchmark_batching.py`, the recommended flags, and a figure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from query_mutator.lab.analysis.figures import new_figure, save_figure
from query_mutator.lab.sizing.collecting import CALLS_PER_STEP, ENVIRONMENTS_PER_CALL
from query_mutator.types import Completion

__all__ = [
    "BATCHED",
    "HEADER",
    "Measurement",
    "Mode",
    "Recommendation",
    "Row",
    "as_json",
    "draw_speedup",
    "recommend",
]

Mode = Literal["sequential", "phase", "pipelined", "async"]

BATCHED: tuple[Mode, ...] = ("phase", "pipelined", "async")
HEADER = (
    "mode", "batch", "calls", "wall s", "calls/s", "speed-up", "efficiency", "p50 s", "p95 s", "queue wait s", "failed",
)  # fmt: skip
WORTHWHILE = 0.95  # of the best rate: a larger batch that gains less is not recommended

_COLORS: dict[Mode, str] = {"phase": "#c1666b", "pipelined": "#7aa6c2", "async": "#1b4965"}
_IDEAL = "#888888"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One run of one mode; times in seconds, over the calls that were answered (NaN without any)."""

    calls: int  # answered or failed
    wall_s: float
    service_s: float  # sum over the calls, as reported by the server
    p50_s: float  # latency of a call, measured by the client
    p95_s: float
    queue_wait_s: float  # mean over the calls
    failed: int = 0

    @classmethod
    def of(cls, completions: Sequence[Completion], *, wall_s: float) -> Measurement:
        """Return the figures of a run's calls; cancelled ones do not count."""
        made = [one for one in completions if one.error is None or one.error.kind != "cancelled"]
        answered = [completion for completion in made if completion.ok]
        waits_s = [completion.latency_s for completion in answered] or [math.nan]
        timed = [completion for completion in answered if completion.total_s > 0]  # else the server reports no times
        return cls(
            calls=len(made),
            wall_s=wall_s,
            service_s=sum(completion.total_s - completion.queue_wait_s for completion in timed) or math.nan,
            p50_s=statistics.median(waits_s),
            p95_s=statistics.quantiles(waits_s * 2 if len(waits_s) == 1 else waits_s, n=20, method="inclusive")[-1],
            queue_wait_s=statistics.fmean(completion.queue_wait_s for completion in timed) if timed else math.nan,
            failed=len(made) - len(answered),
        )

    @property
    def calls_per_s(self) -> float:
        """Return the answered calls per second."""
        return (self.calls - self.failed) / self.wall_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of the table: medians over several runs."""

    mode: Mode
    batch_size: int
    calls: int
    wall_s: float
    calls_per_s: float
    speedup: float  # over sequential
    efficiency: float  # shortest possible wall time with this many slots, over the measured one
    p50_s: float
    p95_s: float
    queue_wait_s: float

    failed: int  # calls of all runs

    @classmethod
    def of(cls, runs: Sequence[Measurement], *, mode: Mode, batch_size: int, slots: int, sequential: float) -> Row:
        """Return the medians over the runs of one mode and batch size; `sequential` is the calls/s to compare with."""
        at_once = min(batch_size, slots)
        rate = statistics.median(run.calls_per_s for run in runs)
        return cls(
            mode=mode,
            batch_size=batch_size,
            calls=runs[0].calls,
            wall_s=statistics.median(run.wall_s for run in runs),
            calls_per_s=rate,
            speedup=rate / sequential if sequential else math.nan,
            efficiency=statistics.median(run.service_s / at_once / run.wall_s for run in runs),
            p50_s=statistics.median(run.p50_s for run in runs),
            p95_s=statistics.median(run.p95_s for run in runs),
            queue_wait_s=statistics.median(run.queue_wait_s for run in runs),
            failed=sum(run.failed for run in runs),
        )

    def cells(self) -> list[str]:
        """Return the row as the table shows it, under HEADER."""
        whole = [str(self.batch_size), str(self.calls)]
        rates = [_cell(self.wall_s, ".2f"), _cell(self.calls_per_s, ".1f"), _cell(self.speedup, ".2f")]
        times = [_cell(seconds, ".3f") for seconds in (self.p50_s, self.p95_s, self.queue_wait_s)]
        return [self.mode, *whole, *rates, _cell(self.efficiency, ".2f"), *times, str(self.failed)]


def _cell(value: float, form: str) -> str:
    return "-" if math.isnan(value) else format(value, form)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """Recommended flags for the trainer, and the reason."""

    batch_size: int
    num_processes: int
    steps_per_s: float
    why: str

    def __str__(self) -> str:
        flags = f"--batch-size {self.batch_size} --num-processes {self.num_processes}"
        return f"recommended: {flags}: {self.steps_per_s:.3g} steps/s ({self.why})"


def recommend(rows: Sequence[Row], *, slots: int | None) -> Recommendation | None:
    """Recommend the smallest batch size whose asynchronous rate is within 5 % of the best, and twice the environments.

    With two environments per call in flight, one is nearly always ready when a reply arrives. `slots` is the number of
    calls that the server processes at the same time, None when unknown. None without an asynchronous row.
    """
    candidates = sorted((row for row in rows if row.mode == "async"), key=lambda row: row.batch_size)
    if not candidates:
        return None
    best = max(row.calls_per_s for row in candidates)
    chosen = next(row for row in candidates if row.calls_per_s >= WORTHWHILE * best)
    if slots is not None and slots < candidates[-1].batch_size:
        reason = f"the server answers about {slots} call{'s' if slots > 1 else ''} at a time"
    elif chosen is candidates[-1]:
        reason = "the largest size measured; a larger one may be faster still"
    else:
        reason = f"larger sizes gain less than {1 - WORTHWHILE:.0%}"
    rate = f"{chosen.calls_per_s:.1f} calls/s, {chosen.speedup:.1f} times sequential"
    return Recommendation(
        batch_size=chosen.batch_size,
        num_processes=ENVIRONMENTS_PER_CALL * chosen.batch_size,
        steps_per_s=chosen.calls_per_s / CALLS_PER_STEP,
        why=f"{rate}; {reason}",
    )


def as_json(rows: Sequence[Row], *, slots: int | None, recommended: Recommendation | None) -> dict[str, Any]:
    """Return rows, slots and recommendation as one JSON object."""
    flags = None if recommended is None else asdict(recommended)
    return {"rows": [asdict(row) for row in rows], "inferred_slots": slots, "recommended": flags}


def draw_speedup(rows: Sequence[Row], path: Path, *, slots: int | None, title: str) -> None:
    """Draw the speed-up over sequential against batch size, and the ideal, which is bounded by the server's slots."""
    figure = new_figure(8, 4.5)
    axes = figure.add_subplot()
    sizes = sorted({row.batch_size for row in rows if row.mode in BATCHED})
    axes.plot(sizes, [min(size, slots or size) for size in sizes], "--", color=_IDEAL, label="ideal")
    for mode in BATCHED:
        found = [row for row in rows if row.mode == mode]
        points = [row.batch_size for row in found], [row.speedup for row in found]
        axes.plot(*points, "o-", color=_COLORS[mode], label=mode)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set(xlabel="batch size (calls in flight)", ylabel="speed-up over sequential")
    axes.set_title(title, fontsize="medium")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left")
    save_figure(figure, path)
