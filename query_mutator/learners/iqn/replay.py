"""Prioritized replay (Schaul et al., 2016, arXiv:1511.05952), in numpy arrays that torch shares.

C transitions kept, B drawn at once, D obs
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from query_mutator.learners.iqn.nstep import Transition
from query_mutator.stats.sampling import WeightedSampler

__all__ = ["SMALLEST_ERROR", "Replay", "Sample"]

SMALLEST_ERROR = 1e-3  # so that a transition that is predicted well is still drawn sometimes


class Sample(NamedTuple):
    """B transitions to learn from."""

    obs: Tensor  # [B, D]
    actions: Tensor  # [B] int64
    returns: Tensor  # [B] n-step
    next_obs: Tensor  # [B, D]
    discounts: Tensor  # [B] weight of the value of next_obs
    weights: Tensor  # [B] importance weights, the largest is 1
    slots: NDArray[np.int64]  # [B] for `set_errors`

    def to(self, device: torch.device) -> Sample:
        """Return the sample with its tensors on `device`."""
        if device.type == "cpu":
            return self
        obs, actions, returns, next_obs, discounts, weights = (column.to(device) for column in self[:6])
        return Sample(obs, actions, returns, next_obs, discounts, weights, self.slots)


class Replay:
    """The last `capacity` transitions. New ones get the largest priority so far, so that each is drawn soon."""

    def __init__(self, capacity: int, obs_dim: int, *, alpha: float, rng: np.random.Generator) -> None:
        self.capacity, self.alpha, self.rng = capacity, alpha, rng
        self._columns: dict[str, NDArray[Any]] = {  # in the order of a Transition; grow to [C] and [C, D]
            "obs": np.zeros((0, obs_dim), dtype=np.float32),
            "actions": np.zeros(0, dtype=np.int64),
            "returns": np.zeros(0, dtype=np.float32),
            "next_obs": np.zeros((0, obs_dim), dtype=np.float32),
            "discounts": np.zeros(0, dtype=np.float32),
        }
        self._sampler = WeightedSampler()  # of priority^alpha
        self.largest_priority = 1.0  # so far
        self.added = 0

    def __len__(self) -> int:
        return min(self.added, self.capacity)

    def add(self, transitions: Sequence[Transition]) -> None:
        """Append transitions; once the replay is full, each replaces the oldest one."""
        if not transitions:
            return
        slots = (self.added + np.arange(len(transitions))) % self.capacity
        self._grow_to(int(slots.max()) + 1)
        for column, values in zip(self._columns.values(), zip(*transitions, strict=True), strict=True):
            column[slots] = values
        self._sampler.update(slots, np.full(len(slots), self.largest_priority**self.alpha))
        self.added += len(slots)

    def sample(self, size: int, *, beta: float) -> Sample:
        """Draw `size` transitions in proportion to priority^alpha, one from each of as many equal shares of the sum."""
        shares = (np.arange(size) + self.rng.random(size)) / size
        slots = self._sampler.find(shares * self._sampler.total)
        chances = self._sampler[slots] / self._sampler.total
        weights = (len(self) * chances) ** -beta
        return Sample(
            **{name: torch.from_numpy(column[slots]) for name, column in self._columns.items()},
            weights=torch.from_numpy((weights / weights.max()).astype(np.float32)),
            slots=slots,
        )

    def set_errors(self, slots: NDArray[np.int64], errors: NDArray[np.floating[Any]]) -> None:
        """Set the priorities of transitions in `slots` [B] to their absolute errors [B]."""
        priorities = errors.astype(np.float64) + SMALLEST_ERROR
        self.largest_priority = max(self.largest_priority, float(priorities.max(initial=0.0)))
        self._sampler.update(slots, priorities**self.alpha)

    def state_dict(self) -> dict[str, Any]:
        """Return the transitions and their priorities: tensors and plain types."""
        size = len(self)
        return {
            **{name: torch.from_numpy(column[:size].copy()) for name, column in self._columns.items()},
            "priorities": torch.from_numpy(self._sampler[np.arange(size)]),
            "largest": self.largest_priority,
            "added": self.added,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a `state_dict`; raise ValueError for one of another size."""
        size = len(state["actions"])
        if size > self.capacity or size != min(state["added"], self.capacity):
            raise ValueError(f"the checkpoint's replay holds {size} transitions; use replay_size={max(1, size)}")
        self._columns = {name: state[name].numpy().copy() for name in self._columns}
        self.largest_priority, self.added = float(state["largest"]), int(state["added"])
        self._sampler.update(np.arange(size), state["priorities"].numpy())

    def _grow_to(self, size: int) -> None:
        """Double the columns until they hold `size` rows: most runs are far shorter than the capacity."""
        rows = len(self._columns["actions"])
        if size <= rows:
            return
        wanted = min(self.capacity, max(1024, size, 2 * rows))
        for name, old in self._columns.items():
            self._columns[name] = np.zeros((wanted, *old.shape[1:]), dtype=old.dtype)
            self._columns[name][:rows] = old
