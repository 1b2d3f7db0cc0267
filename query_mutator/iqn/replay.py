"""Prioritised replay (Schaul et al., 2016, arXiv:1511.05952), in numpy arrays that torch shares.

C transitions kept, B drawn at once, D obs
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from query_mutator.iqn.nstep import Transition
from query_mutator.iqn.sum_tree import SumTree

SMALLEST_ERROR = 1e-3  # so that a transition that is predicted well still comes up


class Sample(NamedTuple):
    """B transitions to learn from."""

    obs: Tensor  # [B, D]
    actions: Tensor  # [B] int64
    returns: Tensor  # [B] n-step
    next_obs: Tensor  # [B, D]
    discounts: Tensor  # [B] weight of the value of next_obs
    weights: Tensor  # [B] importance weights, the largest is 1
    slots: NDArray[np.int64]  # [B] where they stand

    def to(self, device: torch.device) -> Sample:
        """Return the sample with its tensors on `device`."""
        if device.type == "cpu":
            return self
        obs, actions, returns, next_obs, discounts, weights = (column.to(device) for column in self[:6])
        return Sample(obs, actions, returns, next_obs, discounts, weights, self.slots)


class Replay:
    """The last `capacity` transitions; new ones get the largest priority there was, so that each is soon seen."""

    def __init__(self, capacity: int, obs_dim: int, *, alpha: float, rng: np.random.Generator) -> None:
        self.capacity, self.alpha, self.rng = capacity, alpha, rng
        self._obs = np.zeros((0, obs_dim), dtype=np.float32)  # [grows to C, D]
        self._next_obs = np.zeros((0, obs_dim), dtype=np.float32)
        self._actions = np.zeros(0, dtype=np.int64)
        self._returns = np.zeros(0, dtype=np.float32)
        self._discounts = np.zeros(0, dtype=np.float32)
        self._tree = SumTree(capacity)
        self._largest = 1.0
        self.added = 0

    def __len__(self) -> int:
        return min(self.added, self.capacity)

    @property
    def largest_priority(self) -> float:
        """Return the largest priority given so far, the error itself."""
        return self._largest

    def add(self, transitions: Sequence[Transition]) -> None:
        """Append transitions, each over the oldest one once all places are taken."""
        slots = (self.added + np.arange(len(transitions))) % self.capacity
        self._grow_to(int(slots.max(initial=-1)) + 1)
        for slot, one in zip(slots.tolist(), transitions, strict=True):
            self._obs[slot], self._next_obs[slot] = one.obs, one.next_obs
            self._actions[slot], self._returns[slot], self._discounts[slot] = one.action, one.n_return, one.discount
        self._tree.set(slots, np.full(len(slots), self._largest**self.alpha))
        self.added += len(slots)

    def sample(self, size: int, *, beta: float) -> Sample:
        """Draw `size` transitions in proportion to priority^alpha, one from each of as many equal shares of the sum."""
        shares = (np.arange(size) + self.rng.random(size)) / size
        slots = self._tree.find(shares * self._tree.total)
        chances = self._tree[slots] / self._tree.total
        weights = (len(self) * chances) ** -beta
        return Sample(
            obs=torch.from_numpy(self._obs[slots]),
            actions=torch.from_numpy(self._actions[slots]),
            returns=torch.from_numpy(self._returns[slots]),
            next_obs=torch.from_numpy(self._next_obs[slots]),
            discounts=torch.from_numpy(self._discounts[slots]),
            weights=torch.from_numpy((weights / weights.max()).astype(np.float32)),
            slots=slots,
        )

    def set_errors(self, slots: NDArray[np.int64], errors: NDArray[np.floating[Any]]) -> None:
        """Give transitions in `slots` [B] the priorities of their absolute errors [B]."""
        priorities = errors.astype(np.float64) + SMALLEST_ERROR
        self._largest = max(self._largest, float(priorities.max(initial=0.0)))
        self._tree.set(slots, priorities**self.alpha)

    def state_dict(self) -> dict[str, Any]:
        """Return the transitions and their priorities: tensors and plain types."""
        size = len(self)
        columns: tuple[NDArray[Any], ...] = (self._obs, self._next_obs, self._actions, self._returns, self._discounts)
        names = ("obs", "next_obs", "actions", "returns", "discounts")
        return {
            **{name: torch.from_numpy(column[:size].copy()) for name, column in zip(names, columns, strict=True)},
            "priorities": torch.from_numpy(self._tree[np.arange(size)]),
            "largest": self._largest,
            "added": self.added,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken; one of another size is a ValueError."""
        size = len(state["actions"])
        if size > self.capacity or size != min(state["added"], self.capacity):
            raise ValueError(f"the checkpoint's replay holds {size} transitions; try replay_size={max(1, size)}")
        self._obs, self._next_obs = state["obs"].numpy().copy(), state["next_obs"].numpy().copy()
        self._actions, self._returns = state["actions"].numpy().copy(), state["returns"].numpy().copy()
        self._discounts = state["discounts"].numpy().copy()
        self._largest, self.added = float(state["largest"]), int(state["added"])
        self._tree.set(np.arange(size), state["priorities"].numpy())

    def _grow_to(self, size: int) -> None:
        """Double the places until there are `size`: most runs are far shorter than the capacity."""
        if size <= len(self._actions):
            return
        wanted = min(self.capacity, max(1024, size, 2 * len(self._actions)))
        for name in ("_obs", "_next_obs", "_actions", "_returns", "_discounts"):
            old = getattr(self, name)
            grown = np.zeros((wanted, *old.shape[1:]), dtype=old.dtype)
            grown[: len(old)] = old
            setattr(self, name, grown)
