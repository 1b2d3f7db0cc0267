"""From steps of many environments to n-step transitions.

    N environments, D obs, n steps

    return      r_0 + gamma r_1 + ... + gamma^(k-1) r_(k-1)
    discount    gamma^k, or 0 where the episode was terminated: the weight of the value of `next_obs`

k is n, or fewer at an episode's end. A step that failed for good (`valid=False`) is skipped as if it had not
happened: the chain runs from the step before it to the step after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np

from query_mutator.env.steps import Steps
from query_mutator.types import FloatArray

__all__ = ["NStep", "Transition"]


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


@dataclass(slots=True)
class NStep:
    """Hold the steps of each environment that wait for rewards."""

    num_envs: int
    n: int
    gamma: float
    _pending: list[deque[_Pending]] = field(init=False)

    def __post_init__(self) -> None:
        self._pending = [deque() for _ in range(self.num_envs)]

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
        """Return the waiting steps as plain types."""
        return [[{**asdict(one), "obs": one.obs.tolist()} for one in pending] for pending in self._pending]

    def load_state_dict(self, state: list[list[Mapping[str, Any]]]) -> None:
        """Resume from a `state_dict`."""
        self._pending = [
            deque(_Pending(**{**one, "obs": np.array(one["obs"], dtype=np.float32)}) for one in pending)
            for pending in state
        ]

    def forget(self) -> None:
        """Drop the waiting steps: the environments were reset."""
        for pending in self._pending:
            pending.clear()
