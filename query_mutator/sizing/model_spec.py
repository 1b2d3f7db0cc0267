"""Describe what to train in plain values, as a command line or a child process does: a name, sizes, a variant."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from query_mutator.errors import UsageError
from query_mutator.sizing.child import load_target

if TYPE_CHECKING:
    from query_mutator.sizing.memory import Recipe, Workload

__all__ = ["ModelSpec"]


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A preset or `package.module:function`, its sizes, and how to train it; `variant` is as `bf16+checkpointing`."""

    model: str
    sizes: dict[str, Any] = field(default_factory=dict)
    optimizer: Literal["adamw", "adam", "sgd"] = "adamw"
    variant: str | None = None

    def workload(self) -> Workload:
        """Return what to train; UsageError for an unknown preset or a function that returns something else."""
        from query_mutator.sizing.memory import Workload
        from query_mutator.sizing.presets import preset

        if ":" not in self.model:
            return preset(self.model, **self.sizes)
        made = load_target(self.model)(**self.sizes)
        if not isinstance(made, Workload):
            raise UsageError(
                f"{self.model} returns a {type(made).__name__}; return a query_mutator.sizing.memory.Workload"
            )
        return made

    def recipe(self) -> Recipe:
        """Return how to train it; UsageError for an unknown variant."""
        from query_mutator.sizing.memory import recipe_of

        return recipe_of(self.variant, self.optimizer)
