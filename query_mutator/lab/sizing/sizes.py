"""Workloads, recipes, cards, and sizes from a table: robot policies and small networks (sizes.toml). Loads no torch.

peak(B) = max(floor, base + slope B) of B samples in a (micro) batch
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from query_mutator.errors import UsageError
from query_mutator.lab.sizing.machine import GIB, MIB

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = [
    "CONTEXT_BYTES", "PLAIN", "TABLED", "TABLES", "Batch", "Fit", "Optimizer", "Recipe", "Workload", "recipe_of",
    "room_on", "tabled", "train_line", "vram_bytes",
]  # fmt: skip

Optimizer = Literal["adamw", "adam", "sgd", "sgd-momentum", "adafactor"]
Precision = Literal["fp32", "bf16", "fp16"]
Batch: TypeAlias = "tuple[Tensor, ...] | dict[str, Any] | Tensor"


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A workload: `build()` returns the module, `batch(B)` its inputs, `loss(module, *inputs)` a scalar.

    Inputs that are a dict or a single tensor are passed as one argument: `loss(module, inputs)`.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    loss: Callable[..., Tensor]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Settings of the training step."""

    precision: Precision = "fp32"
    optimizer: Optimizer = "adamw"
    accumulate: int = 1
    checkpointing: bool = False
    frozen: tuple[str, ...] = ()  # prefixes of parameter names; "*" for all but the last module
    clip: float | None = 1.0
    device: str = "cuda"  # or "cpu": decides `foreach` of the optimizer, and what autocast leaves in fp32

    def __post_init__(self) -> None:
        for name, known in (("optimizer", get_args(Optimizer)), ("precision", get_args(Precision))):
            if getattr(self, name) not in known:
                raise UsageError(f"{name} {getattr(self, name)!r} is unknown; known are {', '.join(known)}")


def recipe_of(variant: str | None, optimizer: Optimizer = "adamw", device: str = "cuda") -> Recipe:
    """Return the recipe of a variant: bf16, fp16, checkpointing, accumulate:N, frozen[:PREFIX], sgd, joined by +."""
    recipe = Recipe(optimizer=optimizer, device=device)
    for item in re.split(r"[+,]", variant) if variant else ():
        name, _, value = item.partition(":")
        if name in get_args(Precision):
            recipe = replace(recipe, precision=name)  # type: ignore[arg-type]
        elif name in get_args(Optimizer):
            recipe = replace(recipe, optimizer=name)  # type: ignore[arg-type]
        elif name == "checkpointing" and not value:
            recipe = replace(recipe, checkpointing=True)
        elif name == "accumulate" and value.isdigit() and int(value) > 0:
            recipe = replace(recipe, accumulate=int(value))
        elif name == "frozen":
            recipe = replace(recipe, frozen=(value or "*",))
        else:
            known = "bf16, fp16, checkpointing, accumulate:N, frozen, frozen:PREFIX, " + ", ".join(get_args(Optimizer))
            raise UsageError(f"--what-if {item} is unknown; known are {known}")
    return recipe


CONTEXT_BYTES = 600 * MIB  # a CUDA context with its libraries: 300 to 1300 MiB by card and version
SLACK = 0.06  # share of the card kept for workspaces and fragmentation
PLAIN = "as it is"  # the variant without --what-if
TABLES = tomllib.loads(Path(__file__).with_name("sizes.toml").read_text(encoding="utf-8"))
TABLED = tuple(TABLES["models"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Peak bytes by batch size; at small batches the optimizer's own temporaries set the floor."""

    floor: float
    base: float
    slope: float

    def at(self, batch: int) -> float:
        """Return the peak at a batch size."""
        return max(self.floor, self.base + self.slope * batch)

    def largest(self, room: float) -> int:
        """Return the largest batch whose peak is within `room` bytes; 0 if there is none."""
        if self.floor > room:
            return 0
        return 2**20 if self.slope <= 0 else max(0, int((room - self.base) / self.slope))


def room_on(vram: str, *, context_bytes: float = CONTEXT_BYTES) -> float:
    """Return the largest estimate in bytes that fits a card, next to a context and with some slack."""
    return vram_bytes(vram) * (1 - SLACK) - context_bytes


def vram_bytes(text: str) -> int:
    """Return the bytes of `12GB`, `12GiB`, `12227MiB` or a card's name; GB counts as GiB, as makers of cards do."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(g|m)(?:i?b)?", text.strip().lower())
    if match:
        return int(float(match[1]) * (GIB if match[2] == "g" else MIB))
    cards, name = TABLES["cards"], re.sub(r"[\s_]|nvidia|geforce", "", text.lower())
    if name in cards:
        return int(cards[name] * GIB)
    raise UsageError(f"--vram {text} is not an amount or a known card; write 12GB, or one of {', '.join(cards)}")


def tabled(
    name: str,
    variant: str = PLAIN,
    *,
    cameras: int | None = None,
    resolution: tuple[int, int] | None = None,
    tokens: int | None = None,
) -> Fit:
    """Return the fit of a model of the table; UsageError for a variant, or a size, that it lacks."""
    model = TABLES["models"][name]
    row = model["variants"].get(variant.partition(":")[0])
    if row is None:
        raise UsageError(f"--what-if {variant}: the table of {name} knows {', '.join(model['variants'])} alone")
    for flag, given in (("cameras", cameras), ("resolution", resolution), ("tokens", tokens)):
        if given is not None and flag not in model:
            raise UsageError(f"--{flag} is not for {name}")
    count, (height, width) = cameras or model.get("cameras", 0), resolution or model.get("resolution", (0, 0))
    if count not in (known := row.get("cameras", [count])):
        raise UsageError(
            f"--cameras {count} is not in the table of {name}; it has {' or '.join(map(str, known))} cameras"
        )
    images = {
        "camera": count,
        "megapixel": count * height * width / 1e6,
        "kilotoken": (positions := count * math.ceil(height / 32) * math.ceil(width / 32) / 1e3),
        "square": positions**2,
    }
    slope = row["slope"] + sum(row.get(name, 0.0) * amount for name, amount in images.items())
    return Fit(floor=row["floor"] * MIB, base=row["base"] * MIB, slope=slope * MIB)


def train_line(*, policy: str = "act", batch_size: int, workers: int | None = None, prefetch: int = 2) -> str:
    """Return a `lerobot-train` command with options that LeRobot 0.6 has; the data set is left for the reader."""
    options: dict[str, object] = {
        "dataset.repo_id": "USER/DATASET",
        "policy.type": policy,
        "policy.push_to_hub": "false",
        "batch_size": batch_size,
    }
    if workers is not None:
        options["num_workers"] = workers
    if workers:
        options |= {"prefetch_factor": prefetch, "persistent_workers": "true"}
        options["dataloader_multiprocessing_context"] = "spawn"
    return " ".join(["lerobot-train", *(f"--{name}={value}" for name, value in options.items())])
