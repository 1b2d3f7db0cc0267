"""PPO as a `Learner`: a rollout that fills while environments run at their own pace.

T steps, N environments, n of them, D observation
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ppo.config import PPOConfig
from ppo.frozen import FrozenPolicy, InferencePolicy
from query_mutator.learners.learner import Learner, Steps
from query_mutator.types import FloatArray


class PPOLearner(Learner):
    """Stores steps with the log-probabilities and values they were chosen with; `update` learns from a rollout."""

    on_policy = True
    deterministic = True

    def __init__(self, obs_dim: int, num_actions: int, config: PPOConfig, *, mask_columns: slice | None) -> None:
        from ppo.algorithm import PPO  # it loads torch
        from ppo.rollout import RolloutBuffer

        self._ppo = PPO(obs_dim, num_actions, config, mask_columns=mask_columns)
        num_envs = config.num_processes
        self._buffer = RolloutBuffer(config.num_steps, num_envs, obs_dim)
        self._next_obs = np.zeros((num_envs, obs_dim), dtype=np.float32)  # [N, D] after each environment's last step
        # What the policy said when it chose each environment's present action, [N] each.
        self._actions = np.zeros(num_envs, dtype=np.int64)
        self._logprobs = np.zeros(num_envs, dtype=np.float32)
        self._values = np.zeros(num_envs, dtype=np.float32)
        self._take_over()

    def _take_over(self) -> None:
        """Show the policy and counts of the algorithm as those of this learner."""
        ppo = self._ppo
        self.frozen: FrozenPolicy = ppo.frozen
        self.rngs, self.version, self.updates_done = ppo.action_rngs, ppo.updates_done, ppo.updates_done
        self.gradient_steps, self.samples_learned = ppo.gradient_steps, ppo.samples_learned

    @classmethod
    def load_policy(cls, state: Mapping[str, Any], flags: Mapping[str, Any]) -> InferencePolicy:
        """Return the policy of saved weights for inference."""
        return FrozenPolicy(state, deterministic=bool(flags.get("deterministic")))

    @staticmethod
    def planned_updates(config: PPOConfig) -> int:
        """Return the gradient steps of a whole run."""
        return config.num_updates * config.ppo_epoch * config.num_mini_batch

    def act(self, obs: FloatArray, env_ids: Sequence[int]) -> NDArray[np.int64]:
        """Return actions [n] in environments `env_ids` for observations [n, D]."""
        ids = list(env_ids)
        self._actions[ids], self._logprobs[ids], self._values[ids] = self._ppo.act(obs, ids)
        return self._actions[ids]

    def observe(self, steps: Steps) -> None:
        """Store finished steps, at most one per environment."""
        envs, cut = steps.env_ids, steps.truncations
        logprobs = self._logprobs[envs]
        if (steps.actions != self._actions[envs]).any():
            # A resumed run takes the stored actions; the last bits of a probability led to another choice now.
            logprobs = self.frozen.logprobs(steps.obs, steps.actions)
        final_values = np.zeros(len(steps.rewards), dtype=np.float32)
        if cut.any():
            final_values[cut] = self._ppo.get_value(steps.next_obs[cut])
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

    def update(self) -> dict[str, float]:
        """Learn from the rollout, which every environment has filled."""
        assert self._buffer.full
        stats = self._ppo.update(self._buffer, self._next_obs)
        self._buffer.reset()
        self._take_over()
        return stats

    def state_dict(self) -> dict[str, Any]:
        """Return the state between two rollouts as tensors and plain types."""
        return self._ppo.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`; ValueError for a state of other sizes."""
        self._ppo.load_state_dict(state)
        self._take_over()
