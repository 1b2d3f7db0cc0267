"""A bandit fitted on the policy's own transitions: what is left of the policy when every step is a separate trial.

    n transitions, D observation

The policy acts on training questions and draws its actions; nothing else is learned from, and no held-out question.
"""

from __future__ import annotations

import numpy as np

from query_mutator.bandit import Bandit, BanditConfig
from query_mutator.env.steps import FloatArray, Steps
from query_mutator.env.task import Task
from query_mutator.evaluation.methods import Chooser, MakeChooser
from query_mutator.training.learner import InferencePolicy

__all__ = ["Transitions", "sampling"]


def sampling(policy: InferencePolicy, *, seed: int) -> MakeChooser:
    """Return choosers that draw from the policy; question i has the random stream [seed, i]."""

    def make(index: int) -> Chooser:
        rngs = [np.random.default_rng([seed, index])]
        return lambda obs: int(policy.act(obs[None], rngs).actions[0])

    return make


class Transitions:
    """Observations, actions and rewards by question."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, FloatArray, int, float]] = []

    def add(self, index: int, obs: FloatArray, action: int, reward: float) -> None:
        """Add a step on question `index`; those of one question come in their order."""
        self._rows.append((index, obs, action, reward))

    def fit(self, task: Task) -> InferencePolicy:
        """Return the bandit that has learned from all of them; they must not be none."""
        rows = sorted(self._rows, key=lambda row: row[0])  # sums do not depend on the order of replies
        count, obs = len(rows), np.stack([row[1] for row in rows])  # [n, D]
        never = np.zeros(count, dtype=np.bool_)
        whole = np.zeros(count, dtype=np.int64)
        closed = task.observer.slices["closed"]
        bandit = Bandit(task.observer.size, len(task.actions), BanditConfig(), mask_columns=closed)
        bandit.observe(
            Steps(
                env_ids=whole,
                obs=obs,
                actions=np.array([row[2] for row in rows]),
                rewards=np.array([row[3] for row in rows]),
                next_obs=obs,
                terminations=never,
                truncations=never,
                valid=~never,
                versions=whole,
            )
        )
        return bandit.frozen

    def __len__(self) -> int:
        return len(self._rows)
