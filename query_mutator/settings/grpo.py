"""Settings of GRPO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from tyro.conf import arg

from query_mutator.bounds import Few, Group, Parallel, Rate, Steps, Tokens, Weight

__all__ = ["GrpoSettings"]


@dataclass(frozen=True, kw_only=True)
class GrpoSettings(Group):
    """How a model that rewrites is trained by the rewards of groups of its rewrites."""

    max_steps: Steps = 100
    """Steps of the optimizer, each on one group."""
    group_size: Parallel = 8
    """Rewrites of a question that are compared."""
    learning_rate: Annotated[Rate, arg(aliases=["--lr"])] = 1e-4
    """Learning rate of the adapters at the start; it falls to 0."""
    kl_coef: Weight = 0.04
    """Price of the KL divergence from the model that it starts from."""
    lora_rank: Few = 16
    """Rank of the adapters; they are scaled by 2 and merged into the finished model."""
    write_tokens: Tokens = 48
    """Most tokens of a rewrite."""
    write_temperature: Rate = 1.0
    """Sampling temperature of the rewrites in a group."""
    write_price: Weight = 0.0
    """Price of the two calls for a rewrite and its answer, in units of the score."""
    bf16: bool = False
    """Compute in bfloat16, where the processor has it."""
