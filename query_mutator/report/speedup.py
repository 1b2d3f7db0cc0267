"""The speed-up from batching: the rows of `benchmark_batching.py`, the recommended flags, and a figure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from query_mutator.analysis.figures import new_figure, save_figure

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
HEADER = ("mode", "batch", "calls", "wall s", "calls/s", "speed-up", "efficiency", "p50 s", "p95 s", "queue wait s")
WORTHWHILE = 0.95  # of the best rate: a larger batch that gains less is not recommended

_COLORS: dict[Mode, str] = {"phase": "#c1666b", "pipelined": "#7aa6c2", "async": "#1b4965"}
_IDEAL = "#888888"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One run of one mode; times in seconds."""

    calls: int
    wall_s: float
    service_s: float  # sum over the calls, as reported by the server
    p50_s: float  # latency of a call, measured by the client
    p95_s: float
    queue_wait_s: float  # mean over the calls


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

    @classmethod
    def of(cls, runs: Sequence[Measurement], *, mode: Mode, batch_size: int, slots: int, sequential_s: float) -> Row:
        """Return the medians over the runs of one mode and batch size, compared with a sequential run."""
        wall_s = statistics.median(run.wall_s for run in runs)
        at_once = min(batch_size, slots)
        return cls(
            mode=mode,
            batch_size=batch_size,
            calls=runs[0].calls,
            wall_s=wall_s,
            calls_per_s=runs[0].calls / wall_s,
            speedup=sequential_s / wall_s,
            efficiency=statistics.median(run.service_s / at_once / run.wall_s for run in runs),
            p50_s=statistics.median(run.p50_s for run in runs),
            p95_s=statistics.median(run.p95_s for run in runs),
            queue_wait_s=statistics.median(run.queue_wait_s for run in runs),
        )

    def cells(self) -> list[str]:
        """Return the row as the table shows it, under HEADER."""
        whole = [str(self.batch_size), str(self.calls)]
        rates = [f"{self.wall_s:.2f}", f"{self.calls_per_s:.1f}", f"{self.speedup:.2f}", f"{self.efficiency:.2f}"]
        return [self.mode, *whole, *rates, *(f"{s:.3f}" for s in (self.p50_s, self.p95_s, self.queue_wait_s))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """Recommended flags for the trainer, and the reason."""

    batch_size: int
    num_processes: int
    why: str

    def __str__(self) -> str:
        return f"recommended: --batch-size {self.batch_size} --num-processes {self.num_processes} ({self.why})"


def recommend(rows: Sequence[Row], *, slots: int | None) -> Recommendation:
    """Recommend the smallest batch size whose asynchronous rate is within 5 % of the best, and twice the environments.

    With two environments per call in flight, one is nearly always ready when a reply arrives. `slots` is the number of
    calls that the server processes at the same time, None when unknown.
    """
    candidates = sorted((row for row in rows if row.mode == "async"), key=lambda row: row.batch_size)
    best = max(row.calls_per_s for row in candidates)
    chosen = next(row for row in candidates if row.calls_per_s >= WORTHWHILE * best)
    if slots is not None and slots < candidates[-1].batch_size:
        reason = f"the server answers about {slots} call{'s' if slots > 1 else ''} at a time"
    elif chosen is candidates[-1]:
        reason = "the largest size measured; a larger one may be faster still"
    else:
        reason = f"larger sizes gain less than {1 - WORTHWHILE:.0%}"
    rate = f"{chosen.calls_per_s:.1f} calls/s, {chosen.speedup:.1f} times sequential"
    return Recommendation(batch_size=chosen.batch_size, num_processes=2 * chosen.batch_size, why=f"{rate}; {reason}")


def as_json(rows: Sequence[Row], *, slots: int | None, recommended: Recommendation) -> dict[str, Any]:
    """Return rows, slots and recommendation as one JSON object."""
    return {"rows": [asdict(row) for row in rows], "inferred_slots": slots, "recommended": asdict(recommended)}


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
