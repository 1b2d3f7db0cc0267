"""`qm size`: what a training step takes, without a GPU, and the largest batch for a card."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from query_mutator.cli.console import table
from query_mutator.errors import UsageError
from query_mutator.files import disk_errors
from query_mutator.sizing.calibration import Calibration, read_calibration
from query_mutator.sizing.lerobot import train_line
from query_mutator.sizing.model_flags import ModelFlags, recipe_of, workload_of
from query_mutator.sizing.tabled import SMOLVLA, Tabled, smolvla

if TYPE_CHECKING:
    from query_mutator.sizing.memory import MemoryEstimate

MIB, GIB = 2**20, 2**30

#: Memory of cards in GiB, as their makers give it
CARDS = {
    "rtx3060": 12, "rtx3090": 24, "rtx4070": 12, "rtx4080": 16, "rtx4090": 24, "rtx5070": 12, "rtx5080": 16,
    "rtx5090": 32, "t4": 16, "l4": 24, "a10": 24, "v100": 16, "a100": 40, "a100-80": 80, "l40s": 48, "h100": 80,
    "h200": 141, "b200": 180,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SizeFlags(ModelFlags):
    """Say what memory a training step takes, without a GPU, and which batch fits a card.

    The figures are estimates: exact for what PyTorch allocates, a guess for the CUDA context and fragmentation.
    """

    batch: tuple[int, ...] = (1, 8, 32)
    """Batch sizes to size."""
    vram: str | None = None
    """Memory of the card, as 12GB, or its name, as rtx4090: prints the largest batch that fits."""
    what_if: tuple[str, ...] = ()
    """Variants to size beside it: bf16, fp16, checkpointing, accumulate:4, frozen, frozen:PREFIX, sgd; + joins them."""
    context_mib: float = 600.0
    """Memory the CUDA context takes; 300 to 1300 by card and version."""
    calibration: str | None = None
    """File of `qm size calibrate`: what this card really takes, beside the estimate."""
    json: str | None = None
    """File for the results."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.batch or min(self.batch) < 1:
            raise ValueError(f"batch={self.batch} must be at least 1")
        if self.context_mib < 0:
            raise ValueError(f"context_mib={self.context_mib} must not be negative")
        if self.vram is not None:
            vram_bytes(self.vram)


def size(flags: SizeFlags) -> None:
    """Print memory by batch size and variant, and the largest batch for the card."""
    calibration = _calibration(flags)
    if flags.model == SMOLVLA:
        _size_by_table(flags, calibration)
        return
    from query_mutator.sizing.memory import estimate, largest_batch

    workload = workload_of(flags.model, flags.sizes)
    recipes = {variant or "as it is": recipe_of(variant, flags.optimizer) for variant in (None, *flags.what_if)}
    found, fits = [], {}
    for name, recipe in recipes.items():
        found += [(name, estimate(workload, batch, recipe)) for batch in flags.batch]
        if flags.vram is not None:
            fits[name] = largest_batch(workload, calibration.room(vram_bytes(flags.vram)), recipe)[0]
    print(_table(workload.name, found, calibration))
    _print_largest(flags, fits, calibration)
    if any("accumulate" in item for item in flags.what_if):
        print("accumulation at the same micro-batch takes a gradient buffer more; it saves by allowing smaller ones")
    _print_lines(flags, fits)
    print("the largest batch is not the best one: throughput has a knee (qm size throughput), and learning an optimum")
    rows = [{"variant": name, **asdict(one), "activations": one.activations} for name, one in found]
    _write(flags.json, {"model": workload.name, "estimates": rows, "largest_batch": fits})


def _size_by_table(flags: SizeFlags, calibration: Calibration) -> None:
    """Print what the table says of SmolVLA, which is not followed here."""
    variants: dict[str, Tabled] = {"as it is": smolvla(cameras=flags.cameras or 2)}
    if set(flags.what_if) - {"unfrozen"}:
        raise UsageError(f"--what-if {' '.join(flags.what_if)}: the table of smolvla knows unfrozen alone")
    if flags.what_if:
        variants["unfrozen"] = smolvla(cameras=flags.cameras or 2, unfrozen=True)
    rows = [
        (name, str(batch), f"{calibration.factor * row.fit.at(batch) / MIB:,.0f}", f"{row.fit.slope / MIB:,.0f}")
        for name, row in variants.items()
        for batch in flags.batch
    ]
    first = variants["as it is"]
    title = f"{first.name}: MiB of a training step ({first.source}); {first.parameters_m} M parameters"
    print(table(title, ("variant", "batch", "peak", "a sample"), rows))
    fits = {}
    if flags.vram is not None:
        room = calibration.room(vram_bytes(flags.vram))
        fits = {name: row.fit.largest(room) for name, row in variants.items()}
    _print_largest(flags, fits, calibration)
    _print_lines(flags, fits)
    _write(flags.json, {"model": first.name, "fits": {n: asdict(row) for n, row in variants.items()}, "largest": fits})


def _calibration(flags: SizeFlags) -> Calibration:
    if flags.calibration is not None:
        return read_calibration(flags.calibration)
    return Calibration(context_bytes=int(flags.context_mib * MIB))


def _print_largest(flags: SizeFlags, fits: Mapping[str, int], calibration: Calibration) -> None:
    rests = "from a table" if flags.model == SMOLVLA else "estimated"
    for name, batch in fits.items():
        found = batch or "none, not even one sample fits"
        print(f"largest batch on {flags.vram} ({name}): {found} ({rests}, {calibration.rests_on})")


def _print_lines(flags: SizeFlags, fits: Mapping[str, int]) -> None:
    """Print a command line of LeRobot for the robots' policies; half of the largest batch is a place to begin."""
    batch = fits.get("as it is", 0)
    if flags.model in (SMOLVLA, "act") and batch:
        print(train_line(policy=flags.model, batch_size=max(1, batch // 2)))


def _write(path: str | None, data: Mapping[str, Any]) -> None:
    if path is not None:
        with disk_errors(path):
            Path(path).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def vram_bytes(text: str) -> int:
    """Return the bytes of `12GB`, `12GiB`, `12227MiB` or a card's name; GB counts as GiB, as makers of cards do."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(g|m)(?:i?b)?", text.strip().lower())
    if match:
        return int(float(match[1]) * (GIB if match[2] == "g" else MIB))
    name = re.sub(r"[\s_]|nvidia|geforce", "", text.lower())
    if name in CARDS:
        return CARDS[name] * GIB
    raise UsageError(f"--vram {text}: write 12GB, or one of {', '.join(CARDS)}")


def _table(name: str, found: Sequence[tuple[str, MemoryEstimate]], calibration: Calibration) -> str:
    rows = [
        (
            variant,
            str(one.batch),
            *(f"{calibration.factor * part / MIB:,.0f}" for part in (one.peak, one.reserved)),
            *(f"{part / MIB:,.0f}" for part in (one.parameters, one.gradients, one.optimizer)),
            f"{one.activations / MIB:,.0f}",
            max(one.phases, key=lambda phase: one.phases[phase]),
            f"{one.flops / 1e9:,.1f}",
        )
        for variant, one in found
    ]
    header = (
        "variant",
        "batch",
        "peak",
        "reserved",
        "weights",
        "gradients",
        "optimizer",
        "the rest",
        "peak in",
        "GFLOP",
    )
    return table(
        f"{name}: MiB of a training step (estimated; reserved is what a caching allocator may hold)", header, rows
    )
