"""Flags that name what is trained, for all commands that size it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from tyro.conf import Positional

from query_mutator.errors import UsageError
from query_mutator.sizing.target import load_target

if TYPE_CHECKING:
    from query_mutator.sizing.memory import Recipe, Workload


@dataclass(frozen=True, kw_only=True)
class ModelFlags:
    """What is trained, and how."""

    model: Positional[str] = "policy"
    """A preset (a wrong name lists them), or package.module:function that returns a Workload."""
    cameras: int | None = None
    """Cameras of act and smolvla."""
    resolution: str | None = None
    """Height and width of their pictures, as 480x640."""
    tokens: int | None = None
    """Tokens of a row, for language models."""
    optimizer: Literal["adamw", "adam", "sgd"] = "adamw"
    """The optimizer."""

    def __post_init__(self) -> None:
        for name in ("cameras", "tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if self.resolution is not None and not re.fullmatch(r"[1-9]\d*x[1-9]\d*", self.resolution):
            raise ValueError(f"resolution={self.resolution}: write height and width, as 480x640")

    @property
    def sizes(self) -> dict[str, Any]:
        """Return the sizes that were given."""
        height_width = tuple(map(int, self.resolution.split("x"))) if self.resolution else None
        given = {"cameras": self.cameras, "resolution": height_width, "tokens": self.tokens}
        return {name: value for name, value in given.items() if value is not None}


def workload_of(name: str, sizes: dict[str, Any]) -> Workload:
    """Return what is trained; UsageError for a name that is neither a preset nor a function that returns a Workload."""
    from query_mutator.sizing.memory import Workload as Made
    from query_mutator.sizing.presets import preset

    if ":" not in name:
        return preset(name, **sizes)
    made = load_target(name)(**sizes)
    if not isinstance(made, Made):
        raise UsageError(
            f"{name} returns a {type(made).__name__}; it should return a query_mutator.sizing.memory.Workload"
        )
    return made


def recipe_of(variant: str | None, optimizer: Literal["adamw", "adam", "sgd"]) -> Recipe:
    """Return the recipe of a variant written as `bf16+checkpointing`."""
    from query_mutator.sizing.memory import Recipe as Made
    from query_mutator.sizing.memory import with_what_if

    base = Made(optimizer=optimizer)
    return with_what_if(base, re.split(r"[+,]", variant)) if variant else base
