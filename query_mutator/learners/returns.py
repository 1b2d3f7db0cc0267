"""Sums of contexts and returns per action: what a linear regression of returns needs of all episodes so far.

    A actions, D observation, X = D + 1 context (a 1 for the intercept), m steps of an episode

The return of a step is the sum of the rewards from it to the end of its episode: with the reward of the step alone,
rewriting would never pay where asking is another step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from query_mutator.env.steps import Steps
from query_mutator.types import DoubleArray, FloatArray

__all__ = ["ReturnSums", "with_intercept"]

_COLUMNS = 4  # after those of the observation: action, reward, valid, last step of its episode


class ReturnSums:
    """Sums over the valid steps of all episodes that have ended, which a checkpoint holds."""

    def __init__(self, num_actions: int, obs_dim: int) -> None:
        self.outer = np.zeros((num_actions, obs_dim + 1, obs_dim + 1))  # [A, X, X]
        self.returns = np.zeros((num_actions, obs_dim + 1))  # [A, X]
        self.steps = 0  # in the sums
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

    def forget_pending(self) -> None:
        """Drop the steps of episodes that have not ended."""
        self._pending = {}

    def _add(self, rows: NDArray[np.float64]) -> None:
        """Add an episode [m, D + 4]."""
        actions, rewards, valid = rows[:, -_COLUMNS:-1].T
        returns = rewards[::-1].cumsum()[::-1]
        contexts = with_intercept(rows[:, :-_COLUMNS].astype(np.float32))
        for place in np.flatnonzero(valid):
            context, action = contexts[place], int(actions[place])
            self.outer[action] += np.outer(context, context)
            self.returns[action] += returns[place] * context
            self.steps += 1

    def state_dict(self, **arrays: DoubleArray) -> dict[str, Any]:
        """Return half of each symmetric sum, the others, the steps of episodes that have not ended, and `arrays`."""
        import torch

        upper = np.triu_indices(self.outer.shape[1])
        return {
            **{name: torch.from_numpy(array) for name, array in arrays.items()},
            "outer": torch.from_numpy(self.outer[:, *upper]),
            "return": torch.from_numpy(self.returns.copy()),
            "pending": {env: torch.from_numpy(np.array(rows)) for env, rows in self._pending.items() if rows},
        }

    def load_state_dict(self, state: Mapping[str, Any], *, new_episodes: bool = False) -> None:
        """Restore `state_dict`; with `new_episodes` without the steps of those that have not ended."""
        row, column = np.triu_indices(self.outer.shape[1])
        self.outer[:, row, column] = self.outer[:, column, row] = np.asarray(state["outer"])
        self.returns = np.array(state["return"])
        pending = {} if new_episodes else state["pending"]
        self._pending = {env: list(np.array(rows)) for env, rows in pending.items()}


def with_intercept(obs: FloatArray) -> DoubleArray:
    """Return contexts [n, X] of observations [n, D]: each with a 1 appended."""
    return np.concatenate([np.asarray(obs, dtype=np.float64), np.ones((len(obs), 1))], axis=1)
