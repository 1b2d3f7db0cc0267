"""`qm size throughput`, `verify` and `calibrate`: what is measured beside what is estimated."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from query_mutator.cli.console import note, table
from query_mutator.commands.size import vram_bytes
from query_mutator.errors import UsageError
from query_mutator.files import disk_errors
from query_mutator.sizing.budget import machine_budget
from query_mutator.sizing.calibration import fit_calibration, write_calibration
from query_mutator.sizing.child import run_child
from query_mutator.sizing.model_flags import ModelFlags, recipe_of, workload_of

MIB, GIB = 2**20, 2**30
KNEE = 0.9  # of the highest throughput
_SHARE_OF_MEMORY = 0.8
_MEM_GB = re.compile(r"\bmem_gb:\s*([0-9.]+)")


@dataclass(frozen=True, kw_only=True)
class RealFlags(ModelFlags):
    """What is trained, how, and where."""

    variant: str | None = None
    """As --what-if of `qm size`: bf16, checkpointing, accumulate:4, joined by +."""
    device: str = "auto"
    """cpu, cuda or cuda:1; auto takes a GPU where there is one."""
    timeout_s: float = 300.0
    """Seconds after which a measurement is ended."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise ValueError(f"device={self.device} must be auto, cpu, cuda or cuda:N")
        if self.timeout_s <= 0:
            raise ValueError(f"timeout_s={self.timeout_s} must be above 0")


@dataclass(frozen=True, kw_only=True)
class SizeThroughputFlags(RealFlags):
    """Measure samples a second by batch size on this machine, and name the knee: larger ones gain little."""

    batch: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    """Batch sizes to measure."""
    seconds: float = 1.0
    """Seconds of steps at each."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_batches(self.batch)
        if self.seconds <= 0:
            raise ValueError(f"seconds={self.seconds} must be above 0")


@dataclass(frozen=True, kw_only=True)
class SizeVerifyFlags(RealFlags):
    """Compare the estimate with what real steps take: by the profiler on a CPU, by the allocator on a GPU."""

    batch: tuple[int, ...] = (8,)
    """Batch sizes to verify."""
    largest: bool = False
    """On a GPU: find the largest batch that really fits, each trial in a process of its own."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_batches(self.batch)


@dataclass(frozen=True, kw_only=True)
class SizeCalibrateFlags(ModelFlags):
    """Fit what a card takes beside the estimate, from memory measured in real runs, for --calibration of `qm size`."""

    measured: tuple[str, ...] = ()
    """BATCH=MEMORY, as 8=2.4GB: what PyTorch allocated at most (max_memory_allocated)."""
    log: str | None = None
    """A log of LeRobot with mem_gb; its batch size is --log-batch."""
    log_batch: int = 8
    """Batch size of the run that --log is of."""
    totals: bool = False
    """The figures are those of nvidia-smi, the context included."""
    variant: str | None = None
    """How the measured runs trained: bf16, checkpointing, accumulate:4, joined by +."""
    out: str = "calibration.json"
    """File to write."""


def _check_batches(batches: tuple[int, ...]) -> None:
    if not batches or min(batches) < 1:
        raise ValueError(f"batch={batches} must be at least 1")


def size_throughput(flags: SizeThroughputFlags) -> None:
    """Print samples a second by batch size, and the knee."""
    device, rates = device_of(flags.device), {}
    for batch in sorted(flags.batch):
        if device == "cpu" and not _fits_memory(flags, batch):
            note(f"batch {batch} is left out: by the estimate it does not fit this machine's memory")
            continue
        found = _real(flags, batch, device, measure="speed", seconds=flags.seconds)
        if not found["fits"]:
            note(f"batch {batch} does not fit")
            break
        samples = batch * recipe_of(flags.variant, flags.optimizer).accumulate
        rates[batch] = (samples / found["step_s"], found["step_s"], found["steps"])
    if not rates:
        raise UsageError("no batch size could be measured")
    rows = [(str(b), f"{rate:,.4g}", f"{1e3 * step:,.4g}", str(steps)) for b, (rate, step, steps) in rates.items()]
    print(table(f"{flags.model} on {device} (measured)", ("batch", "samples/s", "ms a step", "steps"), rows))
    print(knee_line({batch: rate for batch, (rate, _, _) in rates.items()}))


def knee_of(rates: dict[int, float]) -> int | None:
    """Return the smallest batch with 90 % of the highest throughput; None where it still rises at the largest."""
    sizes = sorted(rates)
    knee = next(batch for batch in sizes if rates[batch] >= KNEE * max(rates.values()))
    return None if knee == sizes[-1] else knee


def knee_line(rates: dict[int, float]) -> str:
    """Return what the knee is, in words."""
    knee = knee_of(rates)
    if knee is None:
        return f"no knee up to batch {max(rates)}: throughput still rises there; measure larger ones"
    share = rates[knee] / max(rates.values())
    return f"knee at batch {knee}: {share:.0%} of the highest throughput; larger batches take memory and gain little"


def verify(flags: SizeVerifyFlags) -> None:
    """Print estimate and truth by batch size; with --largest the largest batch that fits."""
    import torch

    from query_mutator.sizing.memory import estimate

    device, rows = device_of(flags.device), []
    if flags.largest and device == "cpu":
        raise UsageError("--largest needs a GPU: on a CPU the whole machine would run out of memory")
    workload, recipe = workload_of(flags.model, flags.sizes), recipe_of(flags.variant, flags.optimizer)
    for batch in flags.batch:
        with torch.backends.mkldnn.flags(enabled=device != "cpu"):  # its scratch memory is not PyTorch's to count
            found = estimate(workload, batch, _as_on(recipe, device), rounding=1 if device == "cpu" else 512)
        real = _real(flags, batch, device, measure="peak")
        if not real["fits"]:
            rows.append((str(batch), f"{found.peak / MIB:,.1f}", "does not fit", "", ""))
            continue
        off = found.peak / real["peak"] - 1
        reserved = f"{real['reserved'] / MIB:,.1f}" if "reserved" in real else ""
        rows.append((str(batch), f"{found.peak / MIB:,.1f}", f"{real['peak'] / MIB:,.1f}", f"{off:+.1%}", reserved))
    print(table(f"{workload.name} on {device}, MiB", ("batch", "estimated", "measured", "off by", "reserved"), rows))
    if flags.largest:
        _largest(flags, device)


def _largest(flags: SizeVerifyFlags, device: str) -> None:
    batch = bisect(lambda b: bool(_real(flags, b, device, measure="peak")["fits"]))
    print(f"largest batch that fits: {batch or 'none, not even one sample fits'} (measured)")


def bisect(fits: Callable[[int], bool], *, most: int = 2**16) -> int:
    """Return the largest batch that fits: doubled until one does not, then halved in between; 0 when none does."""
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, 2 * high
    while high - low > max(1, low // 64):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def calibrate(flags: SizeCalibrateFlags) -> None:
    """Fit, print and write the calibration."""
    from query_mutator.sizing.memory import estimate

    points = [_point(item) for item in flags.measured] + _logged(flags)
    if not points:
        raise UsageError("give --measured BATCH=MEMORY, or --log FILE of a run of LeRobot")
    workload, recipe = workload_of(flags.model, flags.sizes), recipe_of(flags.variant, flags.optimizer)
    estimated = [estimate(workload, batch, recipe).peak for batch, _ in points]
    try:
        found = fit_calibration([size for _, size in points], estimated, totals=flags.totals)
    except ValueError as error:
        raise UsageError(str(error)) from None
    with disk_errors(flags.out):
        write_calibration(flags.out, found)
    print(f"measured = {found.context_bytes / MIB:,.0f} MiB + {found.factor:.3f} x estimate ({found.rests_on})")
    note(flags.out)


def _point(item: str) -> tuple[int, float]:
    batch, equals, memory = item.partition("=")
    if not (equals and batch.isdigit() and int(batch)):
        raise UsageError(f"--measured {item}: write BATCH=MEMORY, as 8=2.4GB")
    try:
        return int(batch), vram_bytes(memory)
    except UsageError:
        raise UsageError(f"--measured {item}: write BATCH=MEMORY, as 8=2.4GB") from None


def _logged(flags: SizeCalibrateFlags) -> list[tuple[int, float]]:
    if flags.log is None:
        return []
    try:
        text = Path(flags.log).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UsageError(f"--log {flags.log}: {error.strerror}") from None
    found = [float(value) for value in _MEM_GB.findall(text)]
    if not found:
        raise UsageError(f"--log {flags.log} tells no mem_gb; LeRobot logs it when it trains on a GPU")
    return [(flags.log_batch, median(found) * GIB)]


def device_of(name: str) -> str:
    """Return the device to measure on; UsageError for a GPU that is not there."""
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name != "cpu" and not torch.cuda.is_available():
        raise UsageError(f"--device {name}: PyTorch sees no GPU here")
    return name


def _as_on(recipe: Any, device: str) -> Any:
    return replace(recipe, foreach=False, autocast="cpu") if device == "cpu" else recipe


def _fits_memory(flags: RealFlags, batch: int) -> bool:
    from query_mutator.sizing.memory import estimate

    memory = machine_budget().memory_bytes
    recipe = _as_on(recipe_of(flags.variant, flags.optimizer), "cpu")
    return memory is None or estimate(workload_of(flags.model, flags.sizes), batch, recipe).peak < (
        _SHARE_OF_MEMORY * memory
    )


def _real(flags: RealFlags, batch: int, device: str, *, measure: str, seconds: float = 0.0) -> dict[str, Any]:
    task = {
        "model": flags.model,
        "sizes": flags.sizes,
        "variant": flags.variant,
        "optimizer": flags.optimizer,
        "batch": batch,
        "device": device,
        "measure": measure,
        "seconds": seconds,
    }
    what = f"{flags.model} at batch {batch}"
    return run_child("query_mutator.sizing.real_steps", task, what=what, timeout_s=flags.timeout_s)
