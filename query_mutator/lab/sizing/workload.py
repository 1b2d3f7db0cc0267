"""What to train and how, without loading torch: a workload, and the recipe of its training.

B samples in a (micro) batch
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from query_mutator.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["Batch", "Optimizer", "Recipe", "Workload", "recipe_of"]

Optimizer = Literal["adamw", "adam", "sgd", "sgd-momentum", "adafactor"]
Precision = Literal["fp32", "bf16", "fp16"]
Batch: TypeAlias = "tuple[Tensor, ...] | dict[str, Any] | Tensor"


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What to train: `build()` returns the module, `batch(B)` its inputs, `loss(module, *inputs)` a scalar.

    Inputs that are a dict or a single tensor are passed as one argument: `loss(module, inputs)`.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    loss: Callable[..., Tensor]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How to train it."""

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
