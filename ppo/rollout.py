"""The rollout buffer: T steps of each of N environments.

    T steps, N envs, D obs, B valid steps; every array is [T, N] (obs [T, N, D])

Each environment has its own cursor, so environments may run ahead of each other: lock-step and out-of-order
collection give the same buffer.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor


class Batch(NamedTuple):
    """B steps to learn from, in any order; a minibatch is a Batch with fewer rows."""

    obs: Tensor  # [B, D]
    actions: Tensor  # [B] int64
    logprobs: Tensor  # [B] of the policy that acted
    values: Tensor  # [B] of the policy that acted
    advantages: Tensor  # [B]
    returns: Tensor  # [B]

    def take(self, indices: Tensor) -> Batch:
        """Return the rows at `indices`, copied."""
        return Batch(*(column.index_select(0, indices) for column in self))

    def split(self, parts: int) -> list[Batch]:
        """Return views of nearly equal size, at most `parts`, none empty."""
        columns = [column.tensor_split(min(parts, len(self.actions))) for column in self]
        return [Batch(*rows) for rows in zip(*columns, strict=True)]

    def to(self, device: torch.device) -> Batch:
        """Return the batch on `device`."""
        return Batch(*(column.to(device) for column in self))


class RolloutBuffer:
    """Preallocated arrays for `num_steps` steps of each of `num_envs` environments."""

    def __init__(self, num_steps: int, num_envs: int, obs_dim: int) -> None:
        self.num_steps, self.num_envs, self.obs_dim = num_steps, num_envs, obs_dim
        self.obs = torch.zeros(num_steps, num_envs, obs_dim)  # [T, N, D] before the action
        self.actions = torch.zeros(num_steps, num_envs, dtype=torch.int64)  # [T, N]
        self.logprobs = torch.zeros(num_steps, num_envs)  # [T, N]
        self.values = torch.zeros(num_steps, num_envs)  # [T, N]
        self.rewards = torch.zeros(num_steps, num_envs)  # [T, N]
        self.terminations = torch.zeros(num_steps, num_envs, dtype=torch.bool)  # [T, N]
        self.truncations = torch.zeros(num_steps, num_envs, dtype=torch.bool)  # [T, N]
        self.final_values = torch.zeros(num_steps, num_envs)  # [T, N] value of final_obs where truncated
        self.valid = torch.ones(num_steps, num_envs, dtype=torch.bool)  # [T, N] False where the step's call failed
        self.cursor = np.zeros(num_envs, dtype=np.int64)  # [N] steps taken
        self._every_env = np.arange(num_envs)
        # Torch owns the memory, because its allocations are aligned; numpy writes to it, because that is faster.
        self._columns = {name: tensor.numpy() for name, tensor in vars(self).items() if isinstance(tensor, Tensor)}

    @property
    def full(self) -> bool:
        """True when every environment has taken all its steps."""
        return bool((self.cursor == self.num_steps).all())

    def reset(self) -> None:
        """Start the next rollout, which overwrites the contents."""
        self.cursor[:] = 0

    def add(self, env_ids: ArrayLike | None = None, **columns: ArrayLike) -> None:
        """Append one step of each environment in `env_ids` (None: all), with a row per environment in every column.

        The columns are the arrays of the buffer; `final_values` (the critic's values of `final_obs`, for truncated
        steps) and `valid` are optional. ValueError for an environment that has taken all its steps or is named twice.
        """
        envs = self._every_env if env_ids is None else np.asarray(env_ids, dtype=np.int64)
        steps = self._claim(envs, known_distinct=env_ids is None)
        given = {"final_values": 0.0, "valid": True, **columns}
        for name, column in self._columns.items():
            column[steps, envs] = given[name]

    def _claim(self, envs: NDArray[np.int64], *, known_distinct: bool) -> NDArray[np.int64]:
        steps: NDArray[np.int64] = self.cursor[envs]
        if (steps >= self.num_steps).any():
            done = envs[steps >= self.num_steps].tolist()
            raise ValueError(f"environments {done} have taken all their {self.num_steps} steps; reset() the buffer")
        if not known_distinct and len(set(envs.tolist())) < len(envs):
            raise ValueError(
                f"an environment is named twice in {envs.tolist()}; add its steps one call after the other"
            )
        self.cursor[envs] = steps + 1
        return steps

    def batch(self, advantages: Tensor, returns: Tensor) -> Batch:
        """Return the valid steps with their advantages and returns [T, N], ordered by step, then environment."""
        columns = (self.obs, self.actions, self.logprobs, self.values, advantages, returns)
        flat = Batch(*(column.flatten(0, 1) for column in columns))
        return flat.take(self.valid.flatten().nonzero().squeeze(-1))
