"""What `benchmark_batching.py` measures within its time budget, in which order, and what it has measured so far."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median

from query_mutator.report.speedup import BATCHED, Measurement, Mode, Row

__all__ = ["BenchmarkPlan", "Case", "Results", "make_plan"]

Case = tuple[Mode, int]  # mode, batch size

CALLS_PER_QUERY = 2  # a rewrite, then an answer


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
    sequential and async; then further queries. The recommendation needs sequential and async, so these come first.
    """
    every = _cases(sizes, ("async", "pipelined", "phase"))
    needed = [_cases(sizes, ("async",))]
    needed.append([case for case in needed[0] if case[1] <= 4 * (slots or case[1])] or needed[0][:1])

    def run_s(size: int, queries: int) -> float:
        return queries * query_s / min(size, slots or size, queries)

    def seconds(cases: Sequence[Case], queries: int) -> float:
        return sum(run_s(size, queries) for _, size in cases)

    def planned(cases: Sequence[Case], queries: int, times: int) -> BenchmarkPlan:
        return BenchmarkPlan(
            cases=tuple(cases),
            case_s=tuple(run_s(size, queries) for _, size in cases),
            num_queries=queries,
            repeats=times,
            left_out=_left_out(every, cases, queries=num_queries - queries, times=repeats - times, of=repeats),
        )

    for times in range(repeats, 0, -1):
        if times * seconds(every, num_queries) <= budget_s:
            return planned(every, num_queries, times)
    for cases in (every, *needed):
        fewest = min(num_queries, max(size for _, size in cases))
        for queries in range(num_queries, fewest - 1, -1):
            if seconds(cases, queries) <= budget_s:
                return planned(cases, queries, 1)
    cases = needed[-1]
    queries = next((n for n in range(num_queries, 1, -1) if seconds(cases, n) <= budget_s), 1)
    return planned(cases, queries, 1)


def _cases(sizes: Sequence[int], modes: Sequence[Mode]) -> list[Case]:
    return [("sequential", 1), *((mode, size) for mode in modes for size in sizes)]


def _left_out(every: Sequence[Case], cases: Sequence[Case], *, queries: int, times: int, of: int) -> str:
    modes = [mode for mode in BATCHED if mode not in dict(cases)]
    sizes = sorted({size for mode, size in every if mode in dict(cases)} - {size for _, size in cases})
    parts = [
        f"{times} of {of} repeats" if times else "",
        f"{queries} queries of each run" if queries else "",
        f"the modes {' and '.join(modes)}" if modes else "",
        f"the batch sizes {', '.join(map(str, sizes))}" if sizes else "",
    ]
    return ", ".join(filter(None, parts))


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
        mode, size = case
        return Row.of(self.runs[case], mode=mode, batch_size=size, slots=self.slots or size, sequential=alone)

    def line(self, case: Case) -> str:
        """Return the row of one case on one line."""
        name = f"{case[0]}, batch size {case[1]}"
        if case not in self.runs:
            return f"{name}: no call was made"
        row = self.row(case)
        took = f"{row.calls} calls in {row.wall_s:.2f} s, {row.calls_per_s:.1f} calls/s, speed-up {row.speedup:.2f}"
        return f"{name}: {took}" + (f", {row.failed} failed" if row.failed else "")
