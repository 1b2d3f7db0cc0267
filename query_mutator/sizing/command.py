"""`qm size`: what a training step takes, without a GPU, and the largest batch for a card."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tyro.conf import Positional

from query_mutator.console import table
from query_mutator.disk import disk_errors
from query_mutator.errors import UsageError
from query_mutator.sizing.target import load_target

if TYPE_CHECKING:
    from query_mutator.sizing.memory import MemoryEstimate, Workload

MIB, GIB = 2**20, 2**30

#: Memory of cards in GiB, as their makers give it
CARDS = {
    "rtx3060": 12, "rtx3090": 24, "rtx4070": 12, "rtx4080": 16, "rtx4090": 24, "rtx5070": 12, "rtx5080": 16,
    "rtx5090": 32, "t4": 16, "l4": 24, "a10": 24, "v100": 16, "a100": 40, "a100-80": 80, "l40s": 48, "h100": 80,
    "h200": 141, "b200": 180,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SizeFlags:
    """Say what memory a training step takes, without a GPU, and which batch fits a card.

    The figures are estimates: exact for what PyTorch allocates, a guess for the CUDA context and fragmentation.
    """

    model: Positional[str] = "policy"
    """A preset (policy, mlp, gpt, iqn-conv, resnet18), or package.module:function that returns a Workload."""
    batch: tuple[int, ...] = (1, 8, 32)
    """Batch sizes to size."""
    vram: str | None = None
    """Memory of the card, as 12GB, or its name, as rtx4090: prints the largest batch that fits."""
    what_if: tuple[str, ...] = ()
    """Variants to size beside it: bf16, fp16, checkpointing, accumulate:4, frozen, frozen:PREFIX, sgd; + joins them."""
    optimizer: Literal["adamw", "adam", "sgd"] = "adamw"
    """The optimizer."""
    context_mib: float = 600.0
    """Memory the CUDA context takes; 300 to 1300 by card and version."""
    json: str | None = None
    """File for the results."""

    def __post_init__(self) -> None:
        if not self.batch or min(self.batch) < 1:
            raise ValueError(f"batch={self.batch} must be at least 1")
        if self.context_mib < 0:
            raise ValueError(f"context_mib={self.context_mib} must not be negative")
        if self.vram is not None:
            vram_bytes(self.vram)


def size(flags: SizeFlags) -> None:
    """Print memory by batch size and variant, and the largest batch for the card."""
    from query_mutator.sizing.memory import Recipe, estimate, largest_batch, with_what_if

    workload = _workload(flags.model)
    base = Recipe(optimizer=flags.optimizer)
    recipes = {"as it is": base} | {item: with_what_if(base, re.split(r"[+,]", item)) for item in flags.what_if}
    found, fits = [], {}
    for name, recipe in recipes.items():
        found += [(name, estimate(workload, batch, recipe)) for batch in flags.batch]
        if flags.vram is not None:
            context = int(flags.context_mib * MIB)
            fits[name] = largest_batch(workload, vram_bytes(flags.vram), recipe, context_bytes=context)[0]
    print(_table(workload.name, found))
    for name, batch in fits.items():
        print(f"largest batch on {flags.vram} ({name}): {batch or 'none, not even one sample fits'} (estimated)")
    if any("accumulate" in item for item in flags.what_if):
        print("accumulation at the same micro-batch takes a gradient buffer more; it saves by allowing smaller ones")
    print("the largest batch is not the best one: throughput has a knee, and learning an optimum (qm sweep)")
    if flags.json is not None:
        rows = [{"variant": name, **asdict(one), "activations": one.activations} for name, one in found]
        with disk_errors(flags.json):
            text = json.dumps({"model": workload.name, "estimates": rows, "largest_batch": fits}, indent=2)
            Path(flags.json).write_text(text + "\n", encoding="utf-8")


def vram_bytes(text: str) -> int:
    """Return the bytes of `12GB`, `12GiB`, `12227MiB` or a card's name; GB counts as GiB, as makers of cards do."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(g|m)(?:i?b)?", text.strip().lower())
    if match:
        return int(float(match[1]) * (GIB if match[2] == "g" else MIB))
    name = re.sub(r"[\s_]|nvidia|geforce", "", text.lower())
    if name in CARDS:
        return CARDS[name] * GIB
    raise UsageError(f"--vram {text}: write 12GB, or one of {', '.join(CARDS)}")


def _workload(name: str) -> Workload:
    from query_mutator.sizing.memory import Workload as Made
    from query_mutator.sizing.presets import PRESETS

    if ":" not in name:
        return PRESETS.get(name)()
    made = load_target(name)()
    if not isinstance(made, Made):
        raise UsageError(
            f"{name} returns a {type(made).__name__}; it should return a query_mutator.sizing.memory.Workload"
        )
    return made


def _table(name: str, found: Sequence[tuple[str, MemoryEstimate]]) -> str:
    rows = [
        (
            variant,
            str(one.batch),
            *(f"{part / MIB:,.0f}" for part in (one.peak, one.reserved, one.parameters, one.gradients, one.optimizer)),
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
