"""A bandit fitted on the transitions of a training: what is left of the policy when every step is a separate trial.

The value of an action is a ridge regression of the return from its step to the end of the episode (`learners.returns`).
Training questions are all it learns from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from query_mutator.env.steps import Steps
from query_mutator.env.task import Task
from query_mutator.learners.bandit import FrozenBandit
from query_mutator.learners.returns import ReturnSums

__all__ = ["BanditBaseline", "fitted_bandit"]

RIDGE = 1.0


class BanditBaseline:
    """Sums of contexts and returns per action, which a checkpoint holds."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._sums = ReturnSums(len(task.actions), task.observer.size)

    def observe(self, steps: Steps) -> None:
        """Keep finished steps until the end of their episodes."""
        self._sums.observe(steps)

    def flush(self) -> None:
        """Add the finished episodes to the sums."""
        self._sums.flush()

    def fit(self) -> FrozenBandit | None:
        """Return the bandit, None before the first episode has ended."""
        return _acting(self._theta(), self._task)

    def _theta(self) -> NDArray[np.float64]:
        outer = self._sums.outer + RIDGE * np.eye(self._sums.outer.shape[1])
        return np.asarray(np.linalg.solve(outer, self._sums.returns[..., None])[..., 0], dtype=np.float64)

    def state_dict(self) -> dict[str, Any]:
        """Return the coefficients and the sums."""
        return self._sums.state_dict(theta=self._theta())

    def load_state_dict(self, state: Mapping[str, Any], *, new_episodes: bool = False) -> None:
        """Restore `state_dict`; with `new_episodes` without the steps of unfinished ones."""
        self._sums.load_state_dict(state, new_episodes=new_episodes)


def fitted_bandit(state: Mapping[str, Any] | None, task: Task) -> FrozenBandit | None:
    """Return the bandit of a checkpoint or policy file, None where there are no transitions."""
    return None if state is None else _acting(np.asarray(state["theta"]), task)


def _acting(theta: NDArray[np.float64], task: Task) -> FrozenBandit | None:
    """Return the greedy bandit of coefficients [A, X], None for those of no episode."""
    if not theta.any():
        return None
    closed = np.arange(task.observer.size)[task.observer.slices["closed"]]
    return FrozenBandit({"theta": theta, "inverse": np.empty(0), "closed": closed})
