"""PPO as a `Learner`: a rollout that fills while environments run at their own pace.

T steps, N environments, n of them, D observation
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ppo.algorithm import PPO
from ppo.config import PPOConfig
from ppo.frozen import FrozenPolicy
from ppo.rollout import RolloutBuffer
from query_mutator.learners.learner import RolloutPolicy, Steps
from query_mutator.types import FloatArray


class PPOLearner:
    """Stores steps with the log-probabilities and values they were chosen with; `update` learns from a rollout."""

    pending_updates = 0  # between updates the weights are frozen

    def __init__(self, obs_dim: int, num_actions: int, config: PPOConfig, *, mask_columns: slice | None) -> None:
        self._ppo = PPO(obs_dim, num_actions, config, mask_columns=mask_columns)
        num_envs = config.num_processes
        self._buffer = RolloutBuffer(config.num_steps, num_envs, obs_dim)
        self._next_obs = np.zeros((num_envs, obs_dim), dtype=np.float32)  # [N, D] after each environment's last step
        # What the policy said when it chose each environment's present action, [N] each.
        self._actions = np.zeros(num_envs, dtype=np.int64)
        self._logprobs = np.zeros(num_envs, dtype=np.float32)
        self._values = np.zeros(num_envs, dtype=np.float32)

    @property
    def version(self) -> int:
        """Return the updates behind the acting weights."""
        return self._ppo.updates_done

    @property
    def updates_done(self) -> int:
        """Return the rollouts learned from."""
        return self._ppo.updates_done

    @property
    def gradient_steps(self) -> int:
        """Return the minibatches learned from."""
        return self._ppo.gradient_steps

    @property
    def samples_learned(self) -> int:
        """Return the steps learned from, counted once per pass."""
        return self._ppo.samples_learned

    @property
    def frozen(self) -> FrozenPolicy:
        """Return the acting policy for inference."""
        return self._ppo.frozen

    @property
    def rollout_policy(self) -> RolloutPolicy:
        """Return what `act` uses until the next update."""
        return RolloutPolicy(policy=self.frozen, rngs=self._ppo.action_rngs, version=self.version)

    def act(self, obs: FloatArray, env_ids: Sequence[int]) -> NDArray[np.int64]:
        """Return actions [n] in environments `env_ids` for observations [n, D]."""
        ids = list(env_ids)
        self._actions[ids], self._logprobs[ids], self._values[ids] = self._ppo.act(obs, ids)
        return self._actions[ids]

    def observe(self, steps: Steps) -> None:
        """Store finished steps, at most one per environment."""
        logprobs = self._logprobs_of(steps)
        final_values = np.zeros(len(steps.rewards), dtype=np.float32)
        cut = steps.truncations
        if cut.any():
            final_values[cut] = self._ppo.get_value(steps.next_obs[cut])
        envs = steps.env_ids
        self._buffer.add(
            envs,
            obs=steps.obs,
            actions=steps.actions,
            logprobs=logprobs,
            values=self._values[envs],
            rewards=steps.rewards,
            terminations=steps.terminations,
            truncations=cut,
            final_values=final_values,
            valid=steps.valid,
        )
        self._next_obs[envs] = steps.next_obs

    def learn(self) -> None:
        """Do nothing: learning is `update`."""

    def update(self) -> dict[str, float]:
        """Learn from the rollout, which every environment has filled."""
        assert self._buffer.full
        stats = self._ppo.update(self._buffer, self._next_obs)
        self._buffer.reset()
        return stats

    def forget_pending(self) -> None:
        """Do nothing: a rollout starts empty."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state between two rollouts as tensors and plain types."""
        return self._ppo.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`; raise ValueError for a state of other sizes."""
        self._ppo.load_state_dict(state)

    def _logprobs_of(self, steps: Steps) -> FloatArray:
        """Return the log-probabilities [n] of the actions taken.

        A resumed run takes the stored actions. Where the last bits of a probability led to another choice now,
        the log-probability is that of the recorded action.
        """
        if (steps.actions == self._actions[steps.env_ids]).all():
            return self._logprobs[steps.env_ids]
        return self._ppo.frozen.logprobs(steps.obs, steps.actions)
