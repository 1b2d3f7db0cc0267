"""`qm size workers`: the number of worker processes that a data loader needs, measured or from a run's log."""

from __future__ import annotations

import multiprocessing
import os
import time
from dataclasses import asdict, dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Le

from query_mutator.bounds import Parallel, Seconds
from query_mutator.cli.console import note
from query_mutator.cli.outputs import JsonFlags, show
from query_mutator.lab.sizing.budget import Budget, machine_budget
from query_mutator.lab.sizing.lerobot import read_times, verdict
from query_mutator.lab.sizing.loading import LoadTrial, profile_items
from query_mutator.lab.sizing.workers import Tuner, WorkersAdvice
from query_mutator.lab.sizing.workers_report import advice_lines, items_text, known_line, trials_table


@dataclass(frozen=True, kw_only=True)
class SizeWorkersFlags(JsonFlags):
    """Measure how many worker processes a data loader needs, so that training steps hardly wait.

    Chooses the smallest number whose steps wait at most 5 % of the time, at the real time of a step.
    """

    dataset: str | None = None
    """A folder of files, package.module:name of a data set, lerobot:REPO, synthetic:io, synthetic:cpu or
    synthetic:bursty."""
    loader: str | None = None
    """package.module:function that returns a DataLoader; its batch size and collate function are kept."""
    batch_size: Parallel | None = None
    """Items of a batch; by default the loader's, else 8."""
    step_ms: Seconds | None = None
    """Milliseconds of a training step; without it and --step, find the fastest loading (the synthetic sets have their
    own step time)."""
    step: str | None = None
    """package.module:function that is called with each batch instead: the real step."""
    from_logs: str | None = None
    """A log of LeRobot, or a run folder with waiting times and step times: the verdict without measuring."""
    num_workers: Annotated[int, Ge(0), Le(1024)] | None = None
    """With --from-logs: workers that the run had."""
    start_method: Literal["auto", "fork", "spawn", "forkserver"] = "auto"
    """How workers are started; auto compares fork and spawn."""
    window_s: Seconds = 1.5
    """Seconds of each of three windows of a trial."""
    time_s: Seconds = 100.0
    """Seconds after which no further trial starts."""

    def __post_init__(self) -> None:
        given = [name for name in ("dataset", "loader", "from_logs") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError("give one of --dataset, --loader and --from-logs")
        if self.step is not None and self.step_ms is not None:
            raise ValueError("give --step or --step-ms, not both")


def size_workers(flags: SizeWorkersFlags) -> None:
    """Print the trials, the number of workers, and command lines."""
    if flags.from_logs is not None:
        print(verdict(read_times(flags.from_logs, workers=flags.num_workers)))
        return
    from query_mutator.lab.sizing.datasets import STEP_MS

    budget, dataset = machine_budget(), flags.dataset or ""
    advice = _search(flags, budget, usual_step_ms=STEP_MS.get(dataset, 0.0))
    lines = [f"machine: {budget}", items_text(advice), trials_table(advice.tried), *advice_lines(advice)]
    if dataset in STEP_MS and advice.step_s:
        lines.append(known_line(advice, dataset, cpus=budget.cpus))
    show(flags, asdict(advice), "\n".join(lines))


def _search(flags: SizeWorkersFlags, budget: Budget, *, usual_step_ms: float) -> WorkersAdvice:
    began = time.monotonic()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load > budget.cpus:
        note(f"other programs keep this machine busy (load {load:.1f}), which slows what is measured now")
    step_ms = usual_step_ms if flags.step_ms is None else flags.step_ms
    trial = LoadTrial(
        source=flags.loader or flags.dataset or "",
        batch_size=flags.batch_size,
        step=flags.step,
        step_s=0.0 if flags.step is not None else step_ms / 1000,
        window_s=flags.window_s,
    )
    methods = [flags.start_method]
    if flags.start_method == "auto":
        methods = [name for name in ("fork", "spawn") if name in multiprocessing.get_all_start_methods()]
    profile = profile_items(trial)
    return Tuner(trial, profile, budget, start_methods=methods, time_s=flags.time_s, began=began, say=note).advice()
