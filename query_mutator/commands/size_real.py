"""`qm size throughput`, `verify` and `calibrate`: real steps, compared with the estimate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from query_mutator.bounds import Seconds, Size, defaults
from query_mutator.cli.console import note, table
from query_mutator.cli.outputs import Output, OutputFlags, readable
from query_mutator.commands.size import DeviceFlags, ModelFlags, mib_range
from query_mutator.errors import UsageError
from query_mutator.lab.sizing.cards import MIB, fit_calibration, read_calibration, vram_bytes, write_calibration
from query_mutator.lab.sizing.lerobot import logged_memory
from query_mutator.lab.sizing.real_steps import (
    ModelSpec,
    RealStep,
    bisect,
    fits_memory,
    knee_line,
    measure,
    pick_device,
)

if TYPE_CHECKING:
    from query_mutator.lab.sizing.memory import MemoryEstimate


@dataclass(frozen=True, kw_only=True)
class RealFlags(DeviceFlags):
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


@dataclass(frozen=True, kw_only=True)
class SizeCalibrateFlags(ModelFlags, OutputFlags):
    """Fit what a card takes in addition to the estimate, from memory of real runs, for --calibration of `qm size`."""

    measured: tuple[str, ...] = ()
    """BATCH=MEMORY, as 8=2.4GB: the peak that PyTorch allocated (max_memory_allocated)."""
    log: str | None = None
    """A log of LeRobot with mem_gb; its batch size is --log-batch."""
    log_batch: Size = 8
    """Batch size of the run in --log."""
    totals: bool = False
    """The figures are those of nvidia-smi, the context included."""
    variant: str | None = None
    """How the measured runs trained: bf16, checkpointing, accumulate:4, joined by +."""
    out: Annotated[str, Output(readable(read_calibration))] = "calibration.json"
    """File to write."""


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
    from query_mutator.lab.sizing.scratch import onednn

    workload, recipe = spec.workload(), spec.recipe().on(device)
    try:
        with onednn(spec.onednn):
            found = estimate(workload, batch, recipe, rounding=1 if device == "cpu" else 512)
    except UsageError as error:
        note(str(error))
        return None
    return None if found.data_dependent else found


def calibrate(flags: SizeCalibrateFlags) -> None:
    """Fit, print and write the calibration."""
    from query_mutator.lab.sizing.memory import estimate

    points = [_point(item) for item in flags.measured]
    if flags.log is not None:
        points.append((flags.log_batch, logged_memory(flags.log)))
    if not points:
        raise UsageError("nothing was measured; give --measured BATCH=MEMORY, or --log FILE of a run of LeRobot")
    spec = flags.spec(flags.variant)
    workload, recipe = spec.workload(), spec.recipe()
    estimated = [estimate(workload, batch, recipe).peak for batch, _ in points]
    found = fit_calibration([size for _, size in points], estimated, totals=flags.totals)
    write_calibration(flags.out, found)
    print(f"measured = {found.context_bytes / MIB:,.0f} MiB + {found.factor:.3f} x estimate ({found.rests_on})")
    note(flags.out)


def _point(item: str) -> tuple[int, float]:
    batch, _, memory = item.partition("=")
    try:
        if batch.isdigit() and int(batch):
            return int(batch), vram_bytes(memory)
    except UsageError:
        pass
    raise UsageError(f"--measured {item} is not a batch size and its memory; write BATCH=MEMORY, as 8=2.4GB")
