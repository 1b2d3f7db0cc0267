"""n-step transitions from the steps of many environments.

    N environments, D obs, n steps

    return      r_0 + gamma r_1 + ... + gamma^(k-1) r_(k-1)
    discount    gamma^k, or 0 where the episode was terminated: the weight of the value of `next_obs`

k is n, or less at the end of an episode. An invalid step (its call failed for good) is skipped: the chain runs from
the step before it to the step after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]


class Transition(NamedTuple):
    """An observation and action, the n-step return, and the observation it led to."""

    obs: FloatArray  # [D]
    action: int
    n_return: float
    next_obs: FloatArray  # [D]
    discount: float


@dataclass(slots=True)
class _Pending:
    """A step that waits for further rewards."""

    obs: FloatArray
    action: int
    n_return: float = 0.0
    length: int = 0


@dataclass(slots=True)
class NStep:
    """Holds the steps of each environment that wait for further rewards."""

    num_envs: int
    n: int
    gamma: float
    _pending: list[deque[_Pending]] = field(init=False)

    def __post_init__(self) -> None:
        self._pending = [deque() for _ in range(self.num_envs)]

    def add(
        self,
        env: int,
        obs: FloatArray,
        action: int,
        reward: float,
        next_obs: FloatArray,
        *,
        terminated: bool,
        truncated: bool,
        valid: bool = True,
    ) -> list[Transition]:
        """Return the transitions that a step completes; `next_obs` is the episode's last one where it ended."""
        pending = self._pending[env]
        if valid:
            pending.append(_Pending(obs, action))
            for one in pending:
                one.n_return += self.gamma**one.length * reward
                one.length += 1
        done: list[Transition] = []
        while pending and (terminated or truncated or pending[0].length == self.n):
            one = pending.popleft()
            discount = 0.0 if terminated else self.gamma**one.length
            done.append(Transition(one.obs, one.action, one.n_return, next_obs, discount))
        return done

    def state_dict(self) -> list[list[dict[str, Any]]]:
        """Return the waiting steps in plain types."""
        return [
            [
                {"obs": one.obs.tolist(), "action": one.action, "n_return": one.n_return, "length": one.length}
                for one in pending
            ]
            for pending in self._pending
        ]

    def load_state_dict(self, state: list[list[Mapping[str, Any]]]) -> None:
        """Restore `state_dict`."""
        self._pending = [
            deque(
                _Pending(np.array(one["obs"], dtype=np.float32), one["action"], one["n_return"], one["length"])
                for one in pending
            )
            for pending in state
        ]

    def forget(self) -> None:
        """Drop waiting steps: the environments were reset."""
        for pending in self._pending:
            pending.clear()
