"""LinUCB: a linear contextual bandit (Li et al., 2010, arXiv:1003.0146), a simple baseline.

    n rows, D obs, X = D + 1 context (a 1 for the intercept), A actions

Every step is a separate trial: the context is the observation, the reward is that of the step alone. The value of an
action is a ridge regression of its rewards; while training, `ucb_alpha` standard errors are added, which favors
actions tried rarely. Greedy acting adds nothing. Every step is learned from once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ppo.streams import ACTION_STREAM, restore_streams
from query_mutator.env.steps import Steps
from query_mutator.learners.learner import Acted
from query_mutator.settings.learner import BanditConfig
from query_mutator.types import DoubleArray, FloatArray

#: Subtracted from the value of a masked action, so that it is below all others.
MASKED_VALUE = 1e6


class FrozenBandit:
    """A snapshot of coefficients and confidence for inference."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        """Load the state dict of a bandit's policy."""
        try:
            self._theta = np.asarray(state["theta"])  # [A, X]
            self._inverse = np.asarray(state["inverse"])  # [A, X, X]
            self._closed = np.asarray(state["closed"])  # [A] columns, or none
            self.num_actions = self.values(np.zeros((1, self._theta.shape[1] - 1), np.float32)).shape[1]
        except (KeyError, IndexError, ValueError) as error:
            raise ValueError(f"these are not the coefficients of a bandit: {error}") from error

    def values(self, obs: FloatArray, *, ucb_alpha: float = 0.0) -> DoubleArray:
        """Return the optimistic rewards [n, A] under observations [n, D]."""
        contexts = with_intercept(obs)
        values = contexts @ self._theta.T
        if ucb_alpha:
            variance = np.einsum("nx,axy,ny->na", contexts, self._inverse, contexts, optimize=True)
            values = values + ucb_alpha * np.sqrt(np.maximum(variance, 0.0))
        if len(self._closed):
            values = values - MASKED_VALUE * np.asarray(obs)[:, self._closed]
        return np.asarray(values)

    def act(
        self,
        obs: FloatArray,
        rngs: Sequence[np.random.Generator] = (),
        *,
        greedy: bool = False,
        ucb_alpha: float = 0.0,
    ) -> Acted:
        """Return the actions of largest value for observations [n, D]; `rngs` break ties uniformly."""
        values = self.values(obs, ucb_alpha=0.0 if greedy else ucb_alpha)
        best = values.max(axis=1)
        if greedy or not rngs:
            return Acted(values.argmax(axis=1), best.astype(np.float32))
        actions = [rng.choice(np.flatnonzero(row == top)) for rng, row, top in zip(rngs, values, best, strict=True)]
        return Acted(np.array(actions, dtype=np.int64), best.astype(np.float32))


class Bandit:
    """Sums of contexts and rewards per action, and the coefficients they give."""

    def __init__(
        self, obs_dim: int, num_actions: int, config: BanditConfig, *, mask_columns: slice | None = None
    ) -> None:
        """Take sizes and settings; `mask_columns` of an observation are 1 where an action is not allowed."""
        self.config = config
        wide = obs_dim + 1
        self._outer = np.tile(config.ridge * np.eye(wide), (num_actions, 1, 1))  # [A, X, X]
        self._reward = np.zeros((num_actions, wide))  # [A, X]
        self._inverse = np.linalg.inv(self._outer)
        self._closed = np.array([] if mask_columns is None else range(obs_dim)[mask_columns], dtype=np.int64)
        self._rngs = [np.random.default_rng((config.seed + env, ACTION_STREAM)) for env in range(config.num_processes)]
        self.updates_done = self.env_steps = self.gradient_steps = self.samples_learned = self.version = 0
        self._errors: list[float] = []  # squared, of each step before it was learned from
        self._values: list[float] = []
        self.sync_weights()

    @property
    def pending_updates(self) -> int:
        """Return 0: everything is learned in `observe`."""
        return 0

    def act(self, obs: FloatArray, env_ids: Sequence[int]) -> NDArray[np.int64]:
        """Return actions [n] in environments `env_ids`, which see obs [n, D]."""
        rngs = [self._rngs[env] for env in env_ids]
        return self.frozen.act(obs, rngs, ucb_alpha=self.config.ucb_alpha).actions

    def observe(self, steps: Steps) -> None:
        """Learn from valid steps, at most one per environment."""
        self.env_steps += len(steps.env_ids)
        rows = np.flatnonzero(steps.valid)
        if not len(rows):
            return
        contexts, actions, rewards = with_intercept(steps.obs[rows]), steps.actions[rows], steps.rewards[rows]
        expected = (contexts * self._theta[actions]).sum(axis=1)
        self._errors += np.square(rewards - expected).tolist()
        self._values += expected.tolist()
        for context, action, reward in zip(contexts, actions.tolist(), rewards, strict=True):
            self._outer[action] += np.outer(context, context)
            self._reward[action] += reward * context
        changed = np.unique(actions)
        self._inverse = self._inverse.copy()  # the acting policy keeps the old one
        self._inverse[changed] = np.linalg.inv(self._outer[changed])
        self.gradient_steps += 1
        self.samples_learned += len(rows)
        self.sync_weights()

    def learn(self) -> None:
        """Do nothing: everything is learned in `observe`."""

    def forget_pending(self) -> None:
        """Do nothing: no step waits for another."""

    def sync_weights(self) -> None:
        """Act by the current coefficients from now on."""
        self._theta = np.einsum("axy,ay->ax", self._inverse, self._reward)  # [A, X]
        self.frozen = FrozenBandit({"theta": self._theta, "inverse": self._inverse, "closed": self._closed})
        self.version = self.gradient_steps

    def update(self) -> dict[str, float]:
        """Finish a rollout and return its statistics."""
        self.updates_done += 1
        return self.stats()

    def stats(self) -> dict[str, float]:
        """Return the statistics since the last call under their metric keys."""
        stats = {
            "losses/td_loss": float(np.mean(self._errors)) if self._errors else math.nan,
            "rl/avg_value": float(np.mean(self._values)) if self._values else math.nan,
        }
        self._errors, self._values = [], []
        return stats

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state as tensors and plain types."""
        import torch

        return {
            "policy": {
                "theta": torch.from_numpy(self._theta.copy()),
                "inverse": torch.from_numpy(self._inverse.copy()),
                "closed": torch.from_numpy(self._closed.copy()),
            },
            "optimizer": {
                "outer": torch.from_numpy(self._outer.copy()),
                "reward": torch.from_numpy(self._reward.copy()),
            },
            "rng": {"actions": [rng.bit_generator.state for rng in self._rngs]},
            "updates_done": self.updates_done,
            "counts": {
                "env_steps": self.env_steps,
                "gradient_steps": self.gradient_steps,
                "samples_learned": self.samples_learned,
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`; ValueError for other sizes."""
        outer, reward = (state["optimizer"][name].numpy().copy() for name in ("outer", "reward"))
        if outer.shape != self._outer.shape:
            raise ValueError("the checkpoint's bandit has other observations or actions")
        restore_streams(self._rngs, state["rng"]["actions"])
        self._outer, self._reward, self._inverse = outer, reward, np.linalg.inv(outer)
        self.updates_done = int(state["updates_done"])
        for name, count in state["counts"].items():
            setattr(self, name, int(count))
        self.sync_weights()


def with_intercept(obs: FloatArray) -> DoubleArray:
    """Return contexts [n, X] of observations [n, D]: each with a 1 appended."""
    return np.concatenate([np.asarray(obs, dtype=np.float64), np.ones((len(obs), 1))], axis=1)
