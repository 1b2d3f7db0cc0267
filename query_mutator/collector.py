"""A rollout without a barrier: every environment goes on alone until its own quota of steps is done.

    N environments, n of them ready, O observation

The policy is frozen meanwhile and every environment has its own random stream, so the data are those of lock-step. The
quota is per environment: to stop at a total count would over-sample short (refused) episodes.

Every action is in the journal before its step begins. A run that goes on takes the actions that it finds there: where
acting is not deterministic, the last bits of a probability could lead to another one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ppo.algorithm import PPO
from ppo.policy import ActOutput, FloatArray
from ppo.rollout import RolloutBuffer
from query_mutator.journal import Journal
from rl_query_mutator_env import BatchedQueryMutationEnv

#: Hears of steps that came back: infos, which ended their episodes [n], which were carried out [n].
OnSteps = Callable[[dict[str, Any], NDArray[np.bool_], NDArray[np.bool_]], None]


class Collector:
    """Keeps the environments' observations [N, O] from one rollout to the next."""

    def __init__(
        self,
        envs: BatchedQueryMutationEnv,
        ppo: PPO,
        obs: FloatArray,
        *,
        on_steps: OnSteps,
        journal: Journal | None = None,
    ) -> None:
        self._envs, self._ppo, self._on_steps, self._journal = envs, ppo, on_steps, journal
        self.obs = obs  # [N, O]
        self._actions = np.zeros(envs.num_envs, dtype=np.int64)
        self._logprobs = np.zeros(envs.num_envs, dtype=np.float32)
        self._values = np.zeros(envs.num_envs, dtype=np.float32)

    def collect(self, buffer: RolloutBuffer) -> None:
        """Fill the buffer; `on_steps` hears of every group of steps that came back."""
        buffer.reset()
        self._send(np.arange(self._envs.num_envs))
        while not buffer.full:
            next_obs, rewards, terminations, truncations, infos = self._envs.recv()
            ready, valid = infos["env_id"], _valid(infos)  # [n]
            buffer.add(
                ready,
                obs=self.obs[ready],
                actions=self._actions[ready],
                logprobs=self._logprobs[ready],
                values=self._values[ready],
                rewards=rewards,
                terminations=terminations,
                truncations=truncations,
                final_values=self._final_values(truncations, infos),
                valid=valid,
            )
            self.obs[ready] = next_obs
            self._on_steps(infos, terminations | truncations, valid)
            self._send(ready[buffer.cursor[ready] < buffer.num_steps])

    def _send(self, envs: NDArray[np.int64]) -> None:
        """Have the policy choose in these environments and begin their steps."""
        if not len(envs):
            return
        acted = self._ppo.act(self.obs[envs], envs.tolist())
        if self._journal is not None:
            acted = self._journaled(acted, envs, self._journal)
        self._actions[envs], self._logprobs[envs], self._values[envs] = acted
        self._envs.send(acted.actions, envs)

    def _journaled(self, acted: ActOutput, envs: NDArray[np.int64], journal: Journal) -> ActOutput:
        """Return what was done here before the run was ended, and write down what was not."""
        actions = acted.actions.copy()
        for row, env in enumerate(envs.tolist()):
            step = self._envs.envs[env].total_steps
            known = journal.action(env, step)
            if known is None:
                journal.write_action(env, step, int(actions[row]))
            else:
                actions[row] = known
        if (actions == acted.actions).all():
            return acted
        return acted._replace(actions=actions, logprobs=self._ppo.frozen.logprobs(self.obs[envs], actions))

    def _final_values(self, truncations: NDArray[np.bool_], infos: dict[str, Any]) -> FloatArray:
        """Return the critic's values [n] of the observations at which episodes were cut off."""
        values = np.zeros(len(truncations), dtype=np.float32)
        if truncations.any():
            values[truncations] = self._ppo.get_value(np.stack(infos["final_obs"][truncations]))
        return values


def _valid(infos: dict[str, Any]) -> NDArray[np.bool_]:
    """Return which steps [n] were carried out; that of a step which ended an episode is in `final_info`."""
    going_on, ended = infos.get("valid", False), infos.get("final_info", {}).get("valid", False)
    return np.asarray(going_on | ended, dtype=np.bool_)
