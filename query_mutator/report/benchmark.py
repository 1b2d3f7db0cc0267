"""Settings, plan and rows of `benchmark_batching.py`, and the flags that it recommends."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le

from query_mutator.bounds import Million, Seconds, Sigma, Wait
from query_mutator.cli.outputs import JsonTo, OutputFlags
from query_mutator.lab.sizing.collecting import CALLS_PER_STEP, ENVIRONMENTS_PER_CALL
from query_mutator.llm.backends import ServerFlags
from query_mutator.llm.probe import PROBE_WIDTH
from query_mutator.settings.models import ADDRESS_FLAGS
from query_mutator.types import Completion

Mode = Literal["sequential", "phase", "pipelined", "async"]
COLUMNS = {
    "mode": ("mode", ""), "batch_size": ("batch", ""), "calls": ("calls", ""), "wall_s": ("wall s", ".2f"),
    "calls_per_s": ("calls/s", ".1f"), "speedup": ("speed-up", ".2f"), "efficiency": ("efficiency", ".2f"),
    "p50_s": ("p50 s", ".3f"), "p95_s": ("p95 s", ".3f"), "queue_wait_s": ("queue wait s", ".3f"),
    "failed": ("failed", ""),
}  # fmt: skip
WORTHWHILE = 0.95  # of the best rate: a larger batch that gains less is not recommended
Case = tuple[Mode, int]  # mode, batch size
CALLS_PER_QUERY = 2  # a rewrite, then an answer
NUM_QUERIES = 64
BATCH_SIZES = "1,2,4,8,16,32"
LATENCY_MS, NUM_PARALLEL = 100.0, 64  # of the test server


# --- settings ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class BenchmarkConfig(OutputFlags, ServerFlags):
    """Compare sequential, phase-batched, pipelined and asynchronous calls over several batch sizes.

    Without a server the test server is started in its own process; it answers with words of the prompt after a fixed
    time, which measures the scheduling and not a language model.
    """

    mutator_model: str | None = None
    """The model that carries out rewrites; by default the target model."""
    latency_ms: Wait | None = None
    """Mean time the test server takes for a call; by default 100."""
    latency_sigma: Sigma | None = None
    """Log-normal spread of that time; by default 0."""
    num_parallel: Annotated[int, Ge(1), Le(4096)] | None = None
    """Slots of the test server; by default 64."""
    batch_sizes: str | None = None
    """Batch sizes to compare, with commas; by default 1,2,4,8,16,32 and the slots that the probe finds."""
    num_queries: Million = NUM_QUERIES
    """Queries of each measurement; each takes two calls."""
    repeats: Annotated[int, Ge(1), Le(4096)] = 3
    """Measurements of each row, in turns; the table has their medians."""
    budget_s: Seconds = 120.0
    """Seconds for all measurements, once models are loaded; the plan that is printed first says what is left out."""
    json: JsonTo = None
    """Write table, slots and recommendation as JSON to FILE; without FILE, or with -, print them in place of text."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_sizes()
        self._check_server()

    @property
    def sizes(self) -> list[int]:
        """Return the batch sizes in increasing order, without duplicates."""
        text = BATCH_SIZES if self.batch_sizes is None else self.batch_sizes
        return sorted({int(size) for size in text.split(",")})

    def sizes_with(self, slots: int | None) -> list[int]:
        """Return the batch sizes, by default with the server's slots among them, which is what `qm doctor` sets."""
        found = {slots} if slots and self.batch_sizes is None and slots <= max(self.sizes) else set()
        return sorted({*self.sizes, *found})

    @property
    def probe_width(self) -> int:
        """Return how many calls to send at once to count the server's slots."""
        return max(PROBE_WIDTH, *self.sizes)

    @property
    def simulated(self) -> dict[str, Any]:
        """Return how the test server behaves, as its flags."""
        latency_ms = LATENCY_MS if self.latency_ms is None else self.latency_ms
        return {
            "num_parallel": self.num_parallel or NUM_PARALLEL,
            "latency_ms": latency_ms,
            "latency_sigma": self.latency_sigma or 0.0,
        }

    def _check_sizes(self) -> None:
        try:
            in_range = all(1 <= size <= 1024 for size in self.sizes)
        except ValueError:
            in_range = False
        if not in_range:
            raise ValueError(
                f"batch_sizes={self.batch_sizes} must be whole numbers from 1 to 1024 with commas, as 1,2,4,8"
            )

    def _check_server(self) -> None:
        simulated_only = ("latency_ms", "latency_sigma", "num_parallel")
        running_only = (*ADDRESS_FLAGS, "target_model", "mutator_model", "num_ctx")
        wrong: tuple[str, ...] = running_only
        kind = "an Ollama server or another that runs already"
        if self.names_server:
            wrong, kind = simulated_only, "the test server"
        given = [f"--{name.replace('_', '-')}" for name in wrong if getattr(self, name) not in (None, ())]
        if given:
            used = "a running one" if self.names_server else "the test server"
            raise ValueError(f"{given[0]} is for {kind}, and this run uses {used}; leave one of them out")


# --- rows -------------------------------------------------------------------------------------------------------------


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


Row = dict[str, Any]  # of the table: a value for each of COLUMNS, medians over several runs


def row_of(runs: Sequence[Measurement], case: Case, *, slots: int, sequential: float) -> Row:
    """Return the row of the runs of a case; `sequential` is the calls/s to compare with.

    Its efficiency is the shortest possible wall time with this many slots over the measured one.
    """
    (mode, size), names = case, ("wall_s", "calls_per_s", "p50_s", "p95_s", "queue_wait_s")
    found = {name: median(getattr(run, name) for run in runs) for name in names}
    found |= {"mode": mode, "batch_size": size, "calls": runs[0].calls, "failed": sum(run.failed for run in runs)}
    found["speedup"] = found["calls_per_s"] / sequential if sequential else math.nan
    found["efficiency"] = median(run.service_s / min(size, slots) / run.wall_s for run in runs)
    return {name: found[name] for name in COLUMNS}


def cells(row: Row) -> list[str]:
    """Return a row as the table shows it."""
    return ["-" if row[name] != row[name] else format(row[name], form) for name, (_, form) in COLUMNS.items()]


def recommend(rows: Sequence[Row], *, slots: int | None) -> dict[str, Any] | None:
    """Recommend the smallest batch size whose asynchronous rate is within 5 % of the best, and twice the environments.

    With two environments per call in flight, one is nearly always ready when a reply arrives. `slots` is the number of
    calls that the server processes at the same time, None when unknown. None without an asynchronous row.
    """
    candidates = sorted((row for row in rows if row["mode"] == "async"), key=lambda row: row["batch_size"])
    if not candidates:
        return None
    best = max(row["calls_per_s"] for row in candidates)
    chosen = next(row for row in candidates if row["calls_per_s"] >= WORTHWHILE * best)
    if slots is not None and slots < candidates[-1]["batch_size"]:
        reason = f"the server answers about {slots} call{'s' if slots > 1 else ''} at a time"
    elif chosen is candidates[-1]:
        reason = "the largest size measured; a larger one may be faster still"
    else:
        reason = f"larger sizes gain less than {1 - WORTHWHILE:.0%}"
    return {
        "batch_size": chosen["batch_size"],
        "num_processes": ENVIRONMENTS_PER_CALL * chosen["batch_size"],
        "steps_per_s": chosen["calls_per_s"] / CALLS_PER_STEP,
        "why": f"{chosen['calls_per_s']:.1f} calls/s, {chosen['speedup']:.1f} times sequential; {reason}",
    }


# --- plan -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkPlan:
    """Cases in the order in which they are measured, queries of each run, and how often all cases are measured."""

    cases: tuple[Case, ...]
    case_s: tuple[float, ...]  # expected time of one run of each case
    num_queries: int
    repeats: int
    left_out: str = ""  # what the budget leaves out, in words

    @property
    def seconds(self) -> float:
        """Return the expected time of all runs."""
        return self.repeats * sum(self.case_s)

    def runs(self, *, ends_at: float) -> Iterator[tuple[Case, float]]:
        """Yield the runs, each with its share of the time left until `ends_at` of `time.perf_counter()`."""
        left_s = self.seconds
        for case, case_s in self.repeats * list(zip(self.cases, self.case_s, strict=True)):
            yield case, max(0.0, ends_at - time.perf_counter()) * case_s / max(left_s, case_s)
            left_s -= case_s

    def __str__(self) -> str:
        runs = len(self.cases) * self.repeats
        line = f"plan: {runs} runs of {CALLS_PER_QUERY * self.num_queries} calls, about {self.seconds:.0f} s"
        return line + (f"; the budget leaves out {self.left_out}" if self.left_out else "")


def make_plan(
    sizes: Sequence[int], *, num_queries: int, repeats: int, budget_s: float, query_s: float, slots: int | None
) -> BenchmarkPlan:
    """Return what fits into `budget_s` when one query takes `query_s` alone and the server has this many slots.

    What does not fit goes in this order: repeats; queries, as long as the largest batch is full; all modes but
    sequential and async; then further queries.
    """
    every, needed = _cases(sizes, ("async", "pipelined", "phase")), _cases(sizes, ("async",))

    def planned(cases: Sequence[Case], queries: int, times: int) -> BenchmarkPlan:
        left_out = [
            f"{repeats - times} of {repeats} repeats" if times < repeats else "",
            f"{num_queries - queries} queries of each run" if queries < num_queries else "",
            "the modes phase and pipelined" if cases is needed else "",
        ]
        return BenchmarkPlan(
            cases=tuple(cases),
            case_s=tuple(queries * query_s / min(size, slots or size, queries) for _, size in cases),
            num_queries=queries,
            repeats=times,
            left_out=", ".join(filter(None, left_out)),
        )

    fewest = min(num_queries, max(sizes))
    tries = [(every, num_queries, times) for times in range(repeats, 0, -1)]
    tries += [(cases, queries, 1) for cases in (every, needed) for queries in range(num_queries, fewest - 1, -1)]
    tries += [(needed, queries, 1) for queries in range(fewest - 1, 0, -1)]
    return next((plan for each in tries if (plan := planned(*each)).seconds <= budget_s), planned(needed, 1, 1))


def _cases(sizes: Sequence[int], modes: Sequence[Mode]) -> list[Case]:
    return [("sequential", 1), *((mode, size) for mode in modes for size in sizes)]


@dataclass(kw_only=True)
class Results:
    """The runs measured so far, by case."""

    about: str
    slots: int | None  # None when unknown
    advice: str | None
    num_queries: int
    runs: dict[Case, list[Measurement]] = field(default_factory=dict)

    def add(self, case: Case, run: Measurement) -> None:
        """Keep a run; one that was cut short counts only if the case has no whole one."""
        kept = self.runs.get(case, [])
        if not run.calls or (kept and not self._is_whole(run)):
            return
        self.runs[case] = [*(one for one in kept if self._is_whole(one)), run]

    @property
    def remark(self) -> str:
        """Return what is to be said about runs that were cut short."""
        if all(self._is_whole(run) for runs in self.runs.values() for run in runs):
            return ""
        return "rows with fewer calls were cut at their share of the time; --budget-s gives them more"

    def _is_whole(self, run: Measurement) -> bool:
        return run.calls == CALLS_PER_QUERY * self.num_queries

    def rows(self) -> list[Row]:
        """Return the rows of the table, in the order of modes and sizes; none if no call was answered."""
        order: list[Mode] = ["sequential", "phase", "pipelined", "async"]
        measured = sorted(self.runs, key=lambda case: (order.index(case[0]), case[1]))
        if all(run.calls == run.failed for runs in self.runs.values() for run in runs):
            return []
        return [self.row(case) for case in measured]

    def row(self, case: Case) -> Row:
        """Return the row of one case, compared with the sequential one."""
        alone = median(run.calls_per_s for run in self.runs.get(("sequential", 1), self.runs[case]))
        return row_of(self.runs[case], case, slots=self.slots or case[1], sequential=alone)

    def line(self, case: Case) -> str:
        """Return the row of one case on one line."""
        name = f"{case[0]}, batch size {case[1]}"
        if case not in self.runs:
            return f"{name}: no call was made"
        row = self.row(case)
        took = "{calls} calls in {wall_s:.2f} s, {calls_per_s:.1f} calls/s, speed-up {speedup:.2f}".format_map(row)
        return f"{name}: {took}" + (f", {row['failed']} failed" if row["failed"] else "")
