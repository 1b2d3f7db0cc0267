"""`qm size replay`: main memory of what is remembered and of the processes that collect it.

C transitions kept, N environments, T steps of a rollout, bytes by the type of an observation's numbers
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

from query_mutator.cli.console import table
from query_mutator.errors import UsageError

MIB, GIB = 2**20, 2**30
DTYPES = {"uint8": 1, "float16": 2, "float32": 4, "float64": 8, "int64": 8}
PROCESS_BYTES = 256 * MIB  # an interpreter with PyTorch in it, started afresh; forked ones share most of it

Dtype = Literal["uint8", "float16", "float32", "float64", "int64"]


@dataclass(frozen=True, kw_only=True)
class SizeReplayFlags:
    """Say what main memory a replay buffer, a rollout and collectors take."""

    obs: str = "4x84x84"
    """Shape of an observation, as 4x84x84 or 384."""
    dtype: Dtype = "uint8"
    """Type of an observation's numbers."""
    capacity: int = 1_000_000
    """Transitions that the replay buffer keeps."""
    one_copy: bool = False
    """Observations are kept once, not beside the one that follows (optimize_memory_usage of Stable-Baselines3)."""
    prioritised: bool = False
    """A sum tree of priorities is kept beside it."""
    action_numbers: int = 1
    """Numbers that an action is made of."""
    num_envs: int = 8
    """Environments whose observations are at hand, and in a rollout."""
    rollout_steps: int = 0
    """Steps of an on-policy rollout for each environment; 0 for none."""
    num_collectors: int = 0
    """Processes that collect, each with a copy of the network."""
    parameters: int = 0
    """Parameters of the network that each collector has a copy of."""

    def __post_init__(self) -> None:
        shape_of(self.obs)
        for name in ("capacity", "rollout_steps", "num_collectors", "parameters"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")
        if self.num_envs < 1 or self.action_numbers < 1:
            raise ValueError("num_envs and action_numbers must be at least 1")


def size_replay(flags: SizeReplayFlags) -> None:
    """Print the parts and their sum."""
    obs = math.prod(shape_of(flags.obs)) * DTYPES[flags.dtype]
    parts = {
        "replay buffer": replay_bytes(
            obs,
            capacity=flags.capacity,
            action_numbers=flags.action_numbers,
            one_copy=flags.one_copy,
            prioritised=flags.prioritised,
        ),
        "rollout": rollout_bytes(
            obs, steps=flags.rollout_steps, num_envs=flags.num_envs, action_numbers=flags.action_numbers
        ),
        "observations at hand": 2 * flags.num_envs * obs,
        "collectors": flags.num_collectors * (PROCESS_BYTES + 4 * flags.parameters),
    }
    rows = [(name, f"{size / MIB:,.1f}") for name, size in parts.items() if size]
    rows.append(("together", f"{sum(parts.values()) / MIB:,.1f}"))
    print(table(f"an observation takes {obs:,} bytes", ("part", "MiB"), rows))
    print("estimated: sizes of arrays, and by rule of thumb 256 MiB a collecting process")


def shape_of(text: str) -> tuple[int, ...]:
    """Return the numbers of `4x84x84`; UsageError when it is none."""
    if not re.fullmatch(r"\d+(x\d+)*", text) or 0 in (shape := tuple(map(int, text.split("x")))):
        raise UsageError(f"obs={text}: write a shape, as 4x84x84 or 384")
    return shape


def replay_bytes(
    obs_bytes: int, *, capacity: int, action_numbers: int = 1, one_copy: bool = False, prioritised: bool = False
) -> int:
    """Return the bytes of a replay buffer as Stable-Baselines3 lays it out, with a sum tree of 8 bytes a node."""
    kept = (1 if one_copy else 2) * obs_bytes + _action_bytes(action_numbers) + 3 * 4  # reward, done, timeout
    tree = 16 * 2 ** math.ceil(math.log2(max(2, capacity))) if prioritised else 0
    return capacity * kept + tree


def rollout_bytes(obs_bytes: int, *, steps: int, num_envs: int, action_numbers: int = 1) -> int:
    """Return the bytes of an on-policy rollout: reward, return, start, value, logprob and advantage beside the rest."""
    return steps * num_envs * (obs_bytes + _action_bytes(action_numbers) + 6 * 4)


def _action_bytes(numbers: int) -> int:
    return 8 if numbers == 1 else 4 * numbers  # a single one is taken for that of a discrete action
