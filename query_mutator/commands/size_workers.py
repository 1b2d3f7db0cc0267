"""`qm size workers`: how many worker processes a data loader needs, and what that rests on."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from query_mutator.cli.console import note, table
from query_mutator.files import disk_errors
from query_mutator.sizing.budget import machine_budget
from query_mutator.sizing.lerobot import train_line
from query_mutator.sizing.loading import LoadTrial
from query_mutator.sizing.logged import read_times, verdict
from query_mutator.sizing.synthetic import STEP_MS, SYNTHETIC, known_answer
from query_mutator.sizing.workers import Tuner, profile_items

if TYPE_CHECKING:
    from query_mutator.sizing.workers import Tried, WorkersAdvice

MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class SizeWorkersFlags:
    """Measure how many worker processes a data loader needs, so that training steps hardly wait.

    The smallest number is chosen whose steps wait at most 5 % of the time, at the real time of a step.
    """

    dataset: str | None = None
    """A folder of files, package.module:name of a data set, lerobot:REPO, synthetic:io, synthetic:cpu or
    synthetic:bursty."""
    loader: str | None = None
    """package.module:function that returns a DataLoader; its batch size and collate function are kept."""
    batch_size: int | None = None
    """Items of a batch; by default the loader's, else 8."""
    step_ms: float | None = None
    """Milliseconds that a training step takes; without it, and without --step, the fastest loading is looked for (the
    synthetic sets have steps of their own)."""
    step: str | None = None
    """package.module:function that is called with each batch instead: the real step."""
    from_logs: str | None = None
    """A log of LeRobot, or a run folder with waits for data and times of steps: the verdict without measuring."""
    num_workers: int | None = None
    """With --from-logs: workers that the run had."""
    start_method: Literal["auto", "fork", "spawn", "forkserver"] = "auto"
    """How workers are started; auto compares fork and spawn."""
    window_s: float = 1.5
    """Seconds of each of three windows of a trial."""
    time_s: float = 100.0
    """Seconds after which no further trial begins."""
    json: str | None = None
    """File for the results."""

    def __post_init__(self) -> None:
        given = [name for name in ("dataset", "loader", "from_logs") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError("give one of --dataset, --loader and --from-logs")
        if self.step is not None and self.step_ms is not None:
            raise ValueError("give --step or --step-ms, not both")
        for name in ("batch_size", "step_ms", "window_s", "time_s"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name}={value} must be above 0")
        if self.num_workers is not None and self.num_workers < 0:
            raise ValueError(f"num_workers={self.num_workers} must be at least 0")


def size_workers(flags: SizeWorkersFlags) -> None:
    """Print the trials, the number of workers, and command lines."""
    if flags.from_logs is not None:
        print(verdict(read_times(flags.from_logs, workers=flags.num_workers)))
        return
    advice = _measured(flags)
    print(_items(advice))
    print(_table(advice.tried))
    for line in [*_lines(advice), *_known(flags, advice)]:
        print(line)
    if flags.json is not None:
        with disk_errors(flags.json):
            Path(flags.json).write_text(json.dumps(asdict(advice), indent=2) + "\n", encoding="utf-8")


def _measured(flags: SizeWorkersFlags) -> WorkersAdvice:
    began, budget = time.monotonic(), machine_budget()
    print(f"machine: {budget}")
    if hasattr(os, "getloadavg") and os.getloadavg()[0] > budget.cpus:
        note(
            f"other programs keep this machine busy (load {os.getloadavg()[0]:.1f}); what is measured now is theirs too"
        )
    trial = LoadTrial(
        source=flags.loader or flags.dataset or "",
        batch_size=flags.batch_size,
        step=flags.step,
        step_s=_step_ms(flags) / 1000,
        window_s=flags.window_s,
    )
    profile = profile_items(trial)
    methods = [flags.start_method] if flags.start_method != "auto" else _start_methods()
    return Tuner(trial, profile, budget, start_methods=methods, time_s=flags.time_s, began=began, say=note).advice()


def _step_ms(flags: SizeWorkersFlags) -> float:
    if flags.step_ms is not None:
        return flags.step_ms
    return 0.0 if flags.step is not None else STEP_MS.get(flags.dataset or "", 0.0)


def _start_methods() -> list[str]:
    return [name for name in ("fork", "spawn") if name in multiprocessing.get_all_start_methods()]


def _items(advice: WorkersAdvice) -> str:
    profile = advice.profile
    times = sorted(profile.item_s)
    mean, late = sum(times) / len(times), times[int(0.95 * (len(times) - 1))]
    what = {
        "computing": "they compute, so workers help up to the number of processors",
        "waiting": "they wait, so workers help beyond the number of processors",
        "both": "they compute and wait",
    }[advice.bound]
    return (
        f"items: {1e3 * mean:.3g} ms each, 95 % within {1e3 * late:.3g} ms, the longest {1e3 * times[-1]:.3g} ms; "
        f"processor time {profile.cpu_share:.0%}: {what}\n"
        f"a batch of {profile.batch_size}: {1e3 * (mean * profile.batch_size + profile.collate_s):.3g} ms to make, "
        f"{profile.batch_bytes / MIB:.3g} MiB; a step takes {1e3 * advice.step_s:.3g} ms, "
        f"and waits {1e3 * advice.handover_s:.2g} ms for a batch that is ready"
    )


def _table(tried: Sequence[Tried]) -> str:
    rows = [
        (
            str(t.workers),
            str(t.prefetch) if t.workers else "",
            t.start_method if t.workers else "",
            f"{t.loaded.stall:.1%}",
            f"{t.for_data:.1%}",
            f"{t.predicted:.1%}",
            f"{1e3 * t.loaded.wait_p95_s:.1f}",
            f"{t.loaded.samples_per_s:,.0f}",
            f"{t.loaded.startup_s:.2f}",
            f"{t.loaded.worker_bytes / MIB:,.0f}",
        )
        for t in sorted(tried, key=lambda t: (t.workers, t.prefetch, t.start_method))
    ]
    header = ("workers", "ahead", "start", "wait", "for data", "predicted", "p95 ms", "samples/s", "first s", "MiB")
    title = "wait: share of the time that steps wait; for data: without the handing over; MiB: of all workers together"
    return table(title, header, rows)


def _lines(advice: WorkersAdvice) -> list[str]:
    best = advice.chosen
    seen = f"steps wait {best.loaded.stall:.1%} of the time"
    fewer = [t for t in advice.tried if t.workers < best.workers and not t.enough]
    if fewer and advice.enough:
        least = min((t for t in fewer if t.workers == max(t.workers for t in fewer)), key=lambda t: t.loaded.stall)
        seen += f", with {least.workers} {least.loaded.stall:.1%}"
    flags = f"num_workers={best.workers}"
    if best.workers:
        flags += f" prefetch_factor={best.prefetch}"
    lines = [f"{flags}: {seen} (measured)"]
    if best.hidden:
        lines.append(
            f"of that {best.for_data:.1%} to {best.loaded.stall:.1%} are for data: the handing over is slow on this "
            f"machine now. By the items' times it is {best.predicted:.1%} (estimated), and that decided"
        )
    if not advice.enough:
        lines.append(_data_bound(advice))
    lines += _start_lines(advice)
    more = f", prefetch_factor={best.prefetch}, persistent_workers=True" if best.workers else ""
    more += f', multiprocessing_context="{best.start_method}"' if best.workers else ""
    lines.append(f"DataLoader(..., batch_size={advice.profile.batch_size}, num_workers={best.workers}{more})")
    lines.append(_lerobot(advice))
    return lines


def _data_bound(advice: WorkersAdvice) -> str:
    stall = advice.chosen.loaded.stall
    if not advice.step_s:
        return "no time of a step was given: this is the smallest number that loads nearly as fast as any"
    if not advice.complete:
        return "time was up before enough was found: give more with --time-s"
    if advice.keeps_up:
        return (
            "by the items' times alone steps would not wait: what is left is the handing over of batches, or other "
            "programs on this machine; larger batches, or a quiet machine, tell"
        )
    cure = {
        "computing": "make items cheaper (smaller pictures, faster decoding, a cache of what was decoded)",
        "waiting": "bring data nearer (local disk, larger files, a cache in memory)",
        "both": "make items cheaper, or bring data nearer",
    }[advice.bound]
    limit = f", and {advice.limited_by} allow no more than {advice.most}" if advice.workers == advice.most else ""
    return f"no number of workers is enough{limit}: {cure}; up to {1 / (1 - stall):.2g} times as fast"


def _start_lines(advice: WorkersAdvice) -> list[str]:
    same = [t for t in advice.tried if (t.workers, t.prefetch) == (advice.workers, advice.prefetch) and t.workers]
    if len(same) < 2:
        return []
    told = ", ".join(f"{t.start_method} {t.loaded.startup_s:.2g} s" for t in same)
    return [
        f"first batch after: {told} (measured); persistent workers pay that once. spawn is the safe one with threads"
    ]


def _known(flags: SizeWorkersFlags, advice: WorkersAdvice) -> list[str]:
    """Say for a synthetic set what the answer should be."""
    if flags.dataset not in SYNTHETIC or not advice.step_s:
        return []
    size, cpus = advice.profile.batch_size, machine_budget().cpus
    known = known_answer(flags.dataset, batch_size=size, step_s=advice.step_s, cpus=cpus)
    found = "found"
    if known.workers != advice.workers:
        found = f"NOT found ({advice.workers} came out)"
    elif known.workers and known.prefetch != advice.prefetch:
        found = f"num_workers found, with prefetch_factor={advice.prefetch}"
    ahead = f" prefetch_factor={known.prefetch}" if known.workers else ""
    ahead += "" if known.enough else ", which is not enough"
    at = f"{flags.dataset} at {1e3 * advice.step_s:g} ms a step"
    return [f"known answer for {at}: num_workers={known.workers}{ahead}; {found}"]


def _lerobot(advice: WorkersAdvice) -> str:
    return train_line(
        batch_size=advice.profile.batch_size,
        workers=advice.workers,
        prefetch=advice.prefetch,
        start_method=advice.start_method,
    )
