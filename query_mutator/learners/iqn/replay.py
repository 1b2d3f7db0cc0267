"""From steps of many environments to n-step transitions, and their prioritized replay (arXiv:1511.05952).

    N environments, D obs, n steps, C transitions kept, B drawn at once

    return      r_0 + gamma r_1 + ... + gamma^(k-1) r_(k-1)
    discount    gamma^k, or 0 where the episode was terminated: the weight of the value of `next_obs`

k is n, or fewer at an episode's end. A step that failed for good (`valid=False`) is skipped as if it had not
happened: the chain runs from the step before it to the step after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from query_mutator.learners.learner import Steps
from query_mutator.stats import WeightedSampler
from query_mutator.types import FloatArray


class Transition(NamedTuple):
    """An observation, the action on it, the rewards that followed, and where that led."""

    obs: FloatArray  # [D]
    action: int
    n_return: float
    next_obs: FloatArray  # [D]
    discount: float


@dataclass(slots=True)
class _Pending:
    """A step that has fewer than n rewards so far."""

    obs: FloatArray
    action: int
    n_return: float = 0.0
    length: int = 0


class NStep:
    """Hold the steps of each environment that wait for rewards."""

    def __init__(self, num_envs: int, n: int, gamma: float) -> None:
        self.n, self.gamma = n, gamma
        self._pending: list[deque[_Pending]] = [deque() for _ in range(num_envs)]

    def add(self, steps: Steps) -> list[Transition]:
        """Return the transitions that these steps complete, at most one step of each environment."""
        done: list[Transition] = []
        for row, env in enumerate(steps.env_ids.tolist()):
            pending = self._pending[env]
            # 1. the reward counts for this step and for those that wait
            if steps.valid[row]:
                pending.append(_Pending(steps.obs[row], int(steps.actions[row])))
                for one in pending:
                    one.n_return += self.gamma**one.length * float(steps.rewards[row])
                    one.length += 1
            # 2. at an episode's end all are complete, otherwise the one with n rewards
            terminated, ended = steps.terminations[row], steps.terminations[row] or steps.truncations[row]
            while pending and (ended or pending[0].length == self.n):
                one = pending.popleft()
                discount = 0.0 if terminated else self.gamma**one.length
                done.append(Transition(one.obs, one.action, one.n_return, steps.next_obs[row], discount))
        return done

    def state_dict(self) -> list[list[dict[str, Any]]]:
        """Return the waiting steps as arrays and plain types."""
        return [[asdict(one) for one in pending] for pending in self._pending]

    def load_state_dict(self, state: list[list[Mapping[str, Any]]]) -> None:
        """Resume from a `state_dict`."""
        self._pending = [
            deque(_Pending(**{**one, "obs": np.array(one["obs"])}) for one in pending) for pending in state
        ]


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
        return self._replace(**{name: getattr(self, name).to(device) for name in self._fields if name != "slots"})


class Replay:
    """The last `capacity` transitions. New ones get the largest priority so far, so that each is drawn soon."""

    def __init__(self, capacity: int, obs_dim: int, *, alpha: float, rng: np.random.Generator) -> None:
        self.capacity, self.alpha, self.rng = capacity, alpha, rng
        self._columns: dict[str, NDArray[Any]] = {  # in the order of a Transition; rows take memory once they are set
            "obs": np.zeros((capacity, obs_dim), dtype=np.float32),
            "actions": np.zeros(capacity, dtype=np.int64),
            "returns": np.zeros(capacity, dtype=np.float32),
            "next_obs": np.zeros((capacity, obs_dim), dtype=np.float32),
            "discounts": np.zeros(capacity, dtype=np.float32),
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
        for column, values in zip(self._columns.values(), zip(*transitions, strict=True), strict=True):
            column[slots] = values
        self._sampler.update(slots, np.full(len(slots), self.largest_priority**self.alpha))
        self.added += len(slots)

    def sample(self, size: int, *, beta: float) -> Sample:
        """Draw `size` transitions in proportion to priority^alpha, one from each of `size` equal shares of the sum."""
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
        """Return the transitions and their priorities: arrays and plain types."""
        size = len(self)
        return {
            **{name: column[:size].copy() for name, column in self._columns.items()},
            "priorities": self._sampler[np.arange(size)],
            "largest": self.largest_priority,
            "added": self.added,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a `state_dict`; raise ValueError for one of another size."""
        size = len(state["actions"])
        if size > self.capacity or size != min(state["added"], self.capacity):
            raise ValueError(f"the checkpoint's replay holds {size} transitions; use replay_size={max(1, size)}")
        for name, column in self._columns.items():
            column[:size] = state[name]
        self.largest_priority, self.added = float(state["largest"]), int(state["added"])
        self._sampler.update(np.arange(size), np.array(state["priorities"]))
