"""`qm size throughput` and `verify`: real steps; `qm size workers`: the worker processes of a data loader."""

from __future__ import annotations

import multiprocessing
import os
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Ge, Le
from cyclopts import Parameter

from query_mutator.bounds import Parallel, Seconds, Size, defaults
from query_mutator.cli.console import note, table
from query_mutator.cli.outputs import JsonFlags, show
from query_mutator.commands.size import ModelFlags, mib_range
from query_mutator.errors import UsageError
from query_mutator.lab.sizing.machine import MIB, machine_budget
from query_mutator.lab.sizing.steps import ModelSpec, RealStep, bisect, fits_memory, knee_line, measure, pick_device
from query_mutator.lab.sizing.workers import LoadTrial, Profile, Tuner, advice_text, log_verdict, run_trial

if TYPE_CHECKING:
    from query_mutator.lab.sizing.memory import MemoryEstimate


@dataclass(frozen=True, kw_only=True)
class RealFlags(ModelFlags):
    """What to train, how and where, and at which batch sizes."""

    variant: str | None = None
    """As --what-if of `qm size`: bf16, checkpointing, accumulate:4, joined by +."""
    batch: tuple[Size, ...] = (8,)
    """Batch sizes to measure."""
    timeout_s: Annotated[Seconds, Parameter(alias="--timeout")] = 300.0
    """Seconds after which a measurement is stopped."""


@dataclass(frozen=True, kw_only=True)
@defaults(batch=(1, 2, 4, 8, 16, 32))
class SizeThroughputFlags(RealFlags):
    """Measure samples per second by batch size on this machine, and the knee: larger batches gain little."""

    seconds: Seconds = 1.0
    """Seconds of steps at each."""


@dataclass(frozen=True, kw_only=True)
class SizeVerifyFlags(RealFlags):
    """Compare the estimate with the memory of real steps: by the profiler on a CPU, by the allocator on a GPU."""

    largest: bool = False
    """On a GPU: find the largest batch that really fits, each trial in a child process."""


def size_throughput(flags: SizeThroughputFlags) -> None:
    """Print samples per second by batch size, and the knee."""
    spec, device = flags.spec(flags.variant), pick_device(flags.device)
    found: dict[int, RealStep] = {}
    for batch in sorted(flags.batch):
        if device == "cpu" and not fits_memory(spec, batch):
            note(f"batch {batch} is left out: by the estimate it does not fit this machine's memory")
            continue
        real = measure(spec, batch, device=device, timeout_s=flags.timeout_s, seconds=flags.seconds)
        if not real.fits:
            note(f"batch {batch} does not fit")
            break
        found[batch] = real
    if not found:
        raise UsageError("no batch size could be measured; give smaller ones with --batch")
    accumulate = spec.recipe().accumulate
    rates = {batch: batch * accumulate / real.step_s for batch, real in found.items()}
    rows = [(str(b), f"{rates[b]:,.4g}", f"{1e3 * one.step_s:,.4g}", str(one.steps)) for b, one in found.items()]
    print(table(f"{flags.titled(flags.model, device)} (measured)", ("batch", "samples/s", "ms a step", "steps"), rows))
    print(knee_line(rates))


def verify(flags: SizeVerifyFlags) -> None:
    """Print estimate and measurement by batch size; with --largest the largest batch that fits."""
    device, rows = pick_device(flags.device), []
    if flags.largest and device == "cpu":
        raise UsageError("--largest needs a GPU: on a CPU the whole machine would run out of memory")
    spec = flags.spec(flags.variant)

    def real(batch: int) -> RealStep:
        return measure(spec, batch, device=device, timeout_s=flags.timeout_s)

    for batch in flags.batch:
        estimated, found = _estimated(spec, batch, device), real(batch)
        said = "refused" if estimated is None else mib_range(estimated.low, estimated.peak, digits=1)
        measured, off, reserved = "does not fit", "", ""
        if found.fits:
            measured = f"{found.peak / MIB:,.1f}"
            off = "" if estimated is None else f"{estimated.peak / found.peak - 1:+.1%}"
            reserved = "" if found.reserved is None else f"{found.reserved / MIB:,.1f}"
        rows.append((str(batch), said, measured, off, reserved))
    header = ("batch", "estimated", "measured", "off by", "reserved")
    print(table(f"{flags.titled(flags.model, device)}, MiB", header, rows))
    if any(row[1] == "refused" for row in rows):
        print("refused: its sizes depend on values of tensors, so they hold for data like those that were measured")
    if flags.largest:
        batch = bisect(lambda batch: real(batch).fits)
        print(f"largest batch that fits: {batch or 'none, not even one sample fits'} (measured)")


def _estimated(spec: ModelSpec, batch: int, device: str) -> MemoryEstimate | None:
    """Return the estimate for what is measured, None if it depends on data."""
    from query_mutator.lab.sizing.memory import estimate
    from query_mutator.lab.sizing.tracker import onednn

    workload, recipe = spec.workload(), spec.recipe().on(device)
    try:
        with onednn(spec.onednn):
            found = estimate(workload, batch, recipe, rounding=1 if device == "cpu" else 512)
    except UsageError as error:
        note(str(error))
        return None
    return None if found.data_dependent else found


# --- qm size workers --------------------------------------------------------------------------------------------------


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
    """Milliseconds of a training step; without it and --step, find the fastest loading."""
    step: str | None = None
    """package.module:function that is called with each batch instead: the real step."""
    from_logs: str | None = None
    """A log of LeRobot, or a run folder with waiting times and step times: the verdict without measuring."""
    num_workers: Annotated[int, Ge(0), Le(1024)] | None = None
    """With --from-logs: workers that the run had."""
    start_method: Literal["fork", "spawn", "forkserver"] | None = None
    """How workers are started; by default as PyTorch does here."""
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
        print(log_verdict(flags.from_logs, workers=flags.num_workers))
        return
    ends, budget = time.monotonic() + flags.time_s, machine_budget()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load > budget.cpus:
        note(f"other programs keep this machine busy (load {load:.1f}), which slows what is measured now")
    trial = LoadTrial(
        source=flags.loader or flags.dataset or "",
        batch_size=flags.batch_size,
        start_method=flags.start_method or multiprocessing.get_start_method(),
        step=flags.step,
        step_s=(flags.step_ms or 0.0) / 1000,
        window_s=flags.window_s,
    )
    profile = Profile(**run_trial(trial))
    advice = Tuner(trial, profile, budget, time_s=ends - time.monotonic(), say=note).advice()
    show(flags, asdict(advice), f"machine: {budget}\n{advice_text(advice)}")
