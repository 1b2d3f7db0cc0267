"""PPO as a `Learner`: rollouts that fill while environments run at their own pace.

T steps, N environments, n of them, D observation

With `max_policy_lag` above 0 an environment that has finished its share of a rollout starts the next one at once:
several rollouts fill at the same time, and their steps are corrected for the policy that took them.

With a teacher the first rollouts are demonstrations: it chooses the actions, and the policy learns to imitate it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ppo.algorithm import PPO
from ppo.config import PPOConfig
from ppo.frozen import FrozenPolicy
from ppo.rollout import RolloutBuffer
from query_mutator.env.steps import Steps
from query_mutator.learners.hindsight import Relabel
from query_mutator.learners.learner import InferencePolicy, RolloutPolicy
from query_mutator.types import FloatArray

__all__ = ["PPOLearner"]


class _PartialRollout:
    """A rollout as it fills."""

    def __init__(self, num_steps: int, num_envs: int, obs_dim: int) -> None:
        self.buffer = RolloutBuffer(num_steps, num_envs, obs_dim)
        self.next_obs = np.zeros((num_envs, obs_dim), dtype=np.float32)  # [N, D] after each environment's last step
        self.lag = 0  # updates, summed over steps


class PPOLearner:
    """Stores steps with the log-probabilities and values they were chosen with; `update` learns from a rollout."""

    pending_updates = 0  # between updates the weights are frozen

    def __init__(
        self, obs_dim: int, num_actions: int, config: PPOConfig, *, mask_columns: slice | None, max_policy_lag: int = 0
    ) -> None:
        self._ppo = PPO(obs_dim, num_actions, config, mask_columns=mask_columns)
        num_envs = config.num_processes
        self._rollouts = deque(_PartialRollout(config.num_steps, num_envs, obs_dim) for _ in range(max_policy_lag + 1))
        self._rollout_ids = np.zeros(num_envs, dtype=np.int64)  # [N] which of them each environment writes to
        # What the policy said when it chose each environment's present action, [N] each.
        self._actions = np.zeros(num_envs, dtype=np.int64)
        self._logprobs = np.zeros(num_envs, dtype=np.float32)
        self._values = np.zeros(num_envs, dtype=np.float32)
        self._teacher: InferencePolicy | None = None
        self._teacher_rollouts = 0
        self._relabel: Relabel | None = None

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
        rngs = self._ppo.action_rngs
        if self._teacher is not None and self._is_taught:
            return RolloutPolicy(policy=self._teacher, rngs=rngs, version=self.version, greedy=True)
        return RolloutPolicy(policy=self.frozen, rngs=rngs, version=self.version)

    def learn_from(self, teacher: InferencePolicy, *, rollouts: int, relabel: Relabel | None) -> None:
        """Have `teacher` choose the actions of the first `rollouts`, from which the policy learns to imitate it.

        `relabel` changes their observations and actions before.
        """
        self._teacher, self._teacher_rollouts, self._relabel = teacher, rollouts, relabel

    @property
    def _is_taught(self) -> bool:
        """Return whether the present rollout consists of demonstrations."""
        return self._teacher is not None and self.updates_done < self._teacher_rollouts

    def act(self, obs: FloatArray, env_ids: Sequence[int]) -> NDArray[np.int64]:
        """Return actions [n] in environments `env_ids` for observations [n, D]."""
        ids = list(env_ids)
        if self._teacher is not None and self._is_taught:
            self._actions[ids] = self._teacher.act(obs, (), greedy=True).actions
            self._logprobs[ids] = self.frozen.logprobs(obs, self._actions[ids])
            self._values[ids] = self._ppo.get_value(obs)
            return self._actions[ids]
        self._actions[ids], self._logprobs[ids], self._values[ids] = self._ppo.act(obs, ids)
        return self._actions[ids]

    def observe(self, steps: Steps) -> None:
        """Store finished steps in the rollouts their environments are filling."""
        logprobs = self._logprobs_of(steps)
        final_values = np.zeros(len(steps.rewards), dtype=np.float32)
        cut = steps.truncations
        if cut.any():
            final_values[cut] = self._ppo.get_value(steps.next_obs[cut])
        # As they were before: an environment that fills its rollout must not be stored in the next one as well.
        rollout_ids = self._rollout_ids[steps.env_ids]
        for number in np.unique(rollout_ids).tolist():
            rows = rollout_ids == number
            rollout, envs = self._rollouts[number], steps.env_ids[rows]
            rollout.buffer.add(
                envs,
                obs=steps.obs[rows],
                actions=steps.actions[rows],
                logprobs=logprobs[rows],
                values=self._values[envs],
                rewards=steps.rewards[rows],
                terminations=steps.terminations[rows],
                truncations=cut[rows],
                final_values=final_values[rows],
                valid=steps.valid[rows],
            )
            rollout.lag += int((self.updates_done + number - steps.versions[rows]).sum())
            rollout.next_obs[envs] = steps.next_obs[rows]
            self._rollout_ids[envs] += rollout.buffer.cursor[envs] == rollout.buffer.num_steps

    def learn(self) -> None:
        """Do nothing: learning is `update`."""

    def update(self) -> dict[str, float]:
        """Learn from the oldest rollout, which every environment has filled."""
        rollout, lagging = self._rollouts[0], len(self._rollouts) > 1
        assert rollout.buffer.full
        if self._is_taught and self._relabel is not None:
            buffer = rollout.buffer
            ends = buffer.terminations | buffer.truncations
            self._relabel(buffer.obs.numpy(), buffer.actions.numpy(), ends.numpy())
        stats = self._ppo.update(rollout.buffer, rollout.next_obs, stale=lagging, imitate=self._is_taught)
        stats["losses/policy_lag"] = rollout.lag / rollout.buffer.actions.numel()
        rollout.buffer.reset()
        rollout.lag = 0
        self._rollouts.rotate(-1)
        self._rollout_ids -= 1
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

        A resumed run takes the actions of its journal. Where the last bits of a probability led to another choice now,
        the log-probability is that of the recorded action.
        """
        if (steps.actions == self._actions[steps.env_ids]).all():
            return self._logprobs[steps.env_ids]
        return self._ppo.frozen.logprobs(steps.obs, steps.actions)
