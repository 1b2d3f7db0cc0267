"""A bandit fitted on the transitions of a training: what is left of the policy when every step is a separate trial.

    A actions, D observation, X = D + 1 context (a 1 for the intercept), m steps

The value of an action is a ridge regression of the return from its step to the end of the episode: with the reward of
the step alone, rewriting would never pay where asking is another step. Training questions are all it learns from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from query_mutator.env.steps import Steps
from query_mutator.env.task import Task
from query_mutator.learners.bandit import FrozenBandit, with_intercept

__all__ = ["BanditBaseline", "fitted_bandit"]

RIDGE = 1.0
_COLUMNS = 4  # after those of the observation: action, reward, valid, last step of its episode


class BanditBaseline:
    """Sums of contexts and returns per action, which a checkpoint holds."""

    def __init__(self, task: Task) -> None:
        actions, size = len(task.actions), task.observer.size + 1
        self._task = task
        self._outer = np.zeros((actions, size, size))  # [A, X, X]
        self._return = np.zeros((actions, size))  # [A, X]
        self._pending: dict[int, list[NDArray[np.float64]]] = {}  # by environment: steps [D + 4]

    def observe(self, steps: Steps) -> None:
        """Keep finished steps until the end of their episodes."""
        ended = steps.terminations | steps.truncations
        rows = np.column_stack([steps.obs, steps.actions, steps.rewards, steps.valid, ended]).astype(np.float64)
        for env, row in zip(steps.env_ids.tolist(), rows, strict=True):
            self._pending.setdefault(env, []).append(row)

    def flush(self) -> None:
        """Add the finished episodes to the sums, environments in their order: sums do not depend on timing."""
        for env in sorted(self._pending):
            rows = self._pending[env]
            ends = [place + 1 for place, row in enumerate(rows) if row[-1]]
            for start, end in zip((0, *ends), ends, strict=False):
                self._add(np.array(rows[start:end]))
            self._pending[env] = rows[ends[-1] :] if ends else rows

    def _add(self, rows: NDArray[np.float64]) -> None:
        """Add an episode [m, D + 4]."""
        actions, rewards, valid = rows[:, -_COLUMNS:-1].T
        returns = rewards[::-1].cumsum()[::-1]
        contexts = with_intercept(rows[:, :-_COLUMNS].astype(np.float32))
        for place in np.flatnonzero(valid):
            context, action = contexts[place], int(actions[place])
            self._outer[action] += np.outer(context, context)
            self._return[action] += returns[place] * context

    def fit(self) -> FrozenBandit | None:
        """Return the bandit, None before the first episode has ended."""
        return _acting(self._theta(), self._task)

    def _theta(self) -> NDArray[np.float64]:
        outer = self._outer + RIDGE * np.eye(self._outer.shape[1])
        return np.asarray(np.linalg.solve(outer, self._return[..., None])[..., 0], dtype=np.float64)

    def state_dict(self) -> dict[str, Any]:
        """Return the coefficients, the sums, half of each symmetric one, and the steps of unfinished episodes."""
        import torch

        upper = np.triu_indices(self._outer.shape[1])
        return {
            "theta": torch.from_numpy(self._theta()),
            "outer": torch.from_numpy(self._outer[:, *upper]),
            "return": torch.from_numpy(self._return.copy()),
            "pending": {env: torch.from_numpy(np.array(rows)) for env, rows in self._pending.items() if rows},
        }

    def load_state_dict(self, state: Mapping[str, Any], *, new_episodes: bool = False) -> None:
        """Restore `state_dict`; with `new_episodes` without the steps of unfinished ones."""
        row, column = np.triu_indices(self._outer.shape[1])
        self._outer[:, row, column] = self._outer[:, column, row] = np.asarray(state["outer"])
        self._return = np.array(state["return"])
        pending = {} if new_episodes else state["pending"]
        self._pending = {env: list(np.array(rows)) for env, rows in pending.items()}


def fitted_bandit(state: Mapping[str, Any] | None, task: Task) -> FrozenBandit | None:
    """Return the bandit of a checkpoint or policy file, None where there are no transitions."""
    return None if state is None else _acting(np.asarray(state["theta"]), task)


def _acting(theta: NDArray[np.float64], task: Task) -> FrozenBandit | None:
    """Return the greedy bandit of coefficients [A, X], None for those of no episode."""
    if not theta.any():
        return None
    closed = np.arange(task.observer.size)[task.observer.slices["closed"]]
    return FrozenBandit({"theta": theta, "inverse": np.empty(0), "closed": closed})
