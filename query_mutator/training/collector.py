"""A rollout without a barrier: every environment goes on alone until its own quota of steps is done.

    N environments, n of them ready, O observation

The policy is frozen meanwhile and every environment has its own random stream, so the data are those of lock-step. The
quota is per environment: to stop at a total count would over-sample short (refused) episodes.

With `max_policy_lag` above 0 an environment that is done goes on with the next rollout at once, while others finish and
the update runs: those steps are taken by the policy there is, which is older than the one that learns from them by as
many updates as their lag.

Every action is in the journal before its step begins. A run that goes on takes the actions that it finds there: where
acting is not deterministic, the last bits of a probability could lead to another one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ppo.algorithm import PPO
from ppo.policy import ActOutput, FloatArray
from ppo.rollout import RolloutBuffer
from query_mutator.training.journal import Journal
from rl_query_mutator_env import BatchedQueryMutationEnv, rows_of

GROUP_ENVS = 16  # that are sent on together: where hundreds come back at once, the first must not wait for the last

#: Hears of steps that came back: infos, which ended their episodes [n], which were carried out [n].
OnSteps = Callable[[dict[str, Any], NDArray[np.bool_], NDArray[np.bool_]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """A full buffer, what its environments saw after it [N, O], and how old the policy was that filled it."""

    buffer: RolloutBuffer
    next_obs: FloatArray
    policy_lag: float  # updates, mean over steps


class _Part:
    """A rollout as it fills; with a lag, several fill at once."""

    def __init__(self, num_steps: int, num_envs: int, obs_dim: int) -> None:
        self.buffer = RolloutBuffer(num_steps, num_envs, obs_dim)
        self.next_obs = np.zeros((num_envs, obs_dim), dtype=np.float32)
        self.lag = 0

    def reset(self) -> None:
        self.buffer.reset()
        self.lag = 0


class Collector:
    """Keeps the environments' observations [N, O] from one rollout to the next; without `obs` they begin anew."""

    def __init__(
        self,
        envs: BatchedQueryMutationEnv,
        ppo: PPO,
        obs: FloatArray | None,
        *,
        seed: int,
        num_steps: int,
        on_steps: OnSteps,
        max_policy_lag: int = 0,
        journal: Journal | None = None,
    ) -> None:
        self._envs, self._ppo, self._on_steps, self._journal = envs, ppo, on_steps, journal
        self._one_cpu = envs.on_one_cpu()
        num_envs, (obs_dim,) = envs.num_envs, envs.single_observation_space.shape or (0,)
        self._reset_seed = seed if obs is None else None
        self._obs = np.zeros((num_envs, obs_dim), dtype=np.float32) if obs is None else obs
        self._parts = deque(_Part(num_steps, num_envs, obs_dim) for _ in range(max_policy_lag + 1))
        self._part = np.zeros(num_envs, dtype=np.int64)  # which of them each environment writes to; beyond: it waits
        self._is_busy = np.zeros(num_envs, dtype=np.bool_)
        self._actions = np.zeros(num_envs, dtype=np.int64)
        self._logprobs = np.zeros(num_envs, dtype=np.float32)
        self._values = np.zeros(num_envs, dtype=np.float32)
        self._versions = np.zeros(num_envs, dtype=np.int64)  # updates behind the policy that chose the action

    def collect(self) -> Rollout:
        """Return the next rollout, which is good until the next call; `on_steps` hears of all steps that came back."""
        self._parts[-1].reset()
        self._begin()
        part = self._parts[0]
        with self._one_cpu:
            while not part.buffer.full:
                self._take(*self._envs.recv(max_envs=GROUP_ENVS))
                self._one_cpu.look()
        self._parts.rotate(-1)
        self._part -= 1
        return Rollout(
            buffer=part.buffer, next_obs=part.next_obs, policy_lag=part.lag / (part.buffer.num_steps * len(self._obs))
        )

    def _begin(self) -> None:
        if self._reset_seed is None:
            self._send(np.flatnonzero(~self._is_busy))
            return
        self._envs.send_reset(seed=self._reset_seed)
        self._reset_seed = None
        self._is_busy[:] = True

    def _take(
        self,
        next_obs: FloatArray,
        rewards: NDArray[np.float64],
        terminations: NDArray[np.bool_],
        truncations: NDArray[np.bool_],
        infos: dict[str, Any],
    ) -> None:
        """Store steps [n] that came back and have their environments go on; those that were only reset just go on."""
        ready, stepped = infos["env_id"], ~infos.get("reset", np.zeros(len(rewards), dtype=np.bool_))
        self._is_busy[ready] = False
        if stepped.all():
            self._note(ready, next_obs, rewards, terminations, truncations, infos)
        elif stepped.any():
            ended = (terminations[stepped], truncations[stepped])
            self._note(ready[stepped], next_obs[stepped], rewards[stepped], *ended, rows_of(infos, stepped))
        self._obs[ready] = next_obs
        self._send(ready[self._part[ready] < len(self._parts)])

    def _note(
        self,
        envs: NDArray[np.int64],
        next_obs: FloatArray,
        rewards: NDArray[np.float64],
        terminations: NDArray[np.bool_],
        truncations: NDArray[np.bool_],
        infos: dict[str, Any],
    ) -> None:
        valid = carried_out(infos)
        columns = {
            "rewards": rewards,
            "terminations": terminations,
            "truncations": truncations,
            "final_values": self._final_values(truncations, infos),
            "valid": valid,
        }
        self._store(envs, next_obs, columns)
        self._on_steps(infos, terminations | truncations, valid)

    def _store(self, envs: NDArray[np.int64], next_obs: FloatArray, columns: dict[str, Any]) -> None:
        numbers = self._part[envs]  # as they were: an environment that fills its part must not be stored in the next
        for number in sorted(set(numbers.tolist())):
            rows = numbers == number
            part, chosen = self._parts[number], envs[rows]
            part.buffer.add(
                chosen,
                obs=self._obs[chosen],
                actions=self._actions[chosen],
                logprobs=self._logprobs[chosen],
                values=self._values[chosen],
                **{name: column[rows] for name, column in columns.items()},
            )
            part.lag += int((self._ppo.updates_done + number - self._versions[chosen]).sum())
            part.next_obs[chosen] = next_obs[rows]
            self._part[chosen] += part.buffer.cursor[chosen] == part.buffer.num_steps

    def _send(self, envs: NDArray[np.int64]) -> None:
        """Have the policy choose in these environments and begin their steps."""
        if not len(envs):
            return
        acted = self._ppo.act(self._obs[envs], envs.tolist())
        if self._journal is not None:
            acted = self._journaled(acted, envs, self._journal)
        self._actions[envs], self._logprobs[envs], self._values[envs] = acted
        self._versions[envs] = self._ppo.updates_done
        self._is_busy[envs] = True
        self._envs.send(acted.actions, envs)

    def _journaled(self, acted: ActOutput, envs: NDArray[np.int64], journal: Journal) -> ActOutput:
        """Return what was done here before the run was ended, and write down what was not."""
        actions = journal.settle(self._envs.places(envs), acted.actions)
        if (actions == acted.actions).all():
            return acted
        return acted._replace(actions=actions, logprobs=self._ppo.frozen.logprobs(self._obs[envs], actions))

    def _final_values(self, truncations: NDArray[np.bool_], infos: dict[str, Any]) -> FloatArray:
        """Return the critic's values [n] of the observations at which episodes were cut off."""
        values = np.zeros(len(truncations), dtype=np.float32)
        if truncations.any():
            values[truncations] = self._ppo.get_value(np.stack(infos["final_obs"][truncations]))
        return values


def carried_out(infos: dict[str, Any]) -> NDArray[np.bool_]:
    """Return which steps [n] were carried out; that of a step which ended an episode is in `final_info`."""
    going_on, ended = infos.get("valid", False), infos.get("final_info", {}).get("valid", False)
    return np.asarray(going_on | ended, dtype=np.bool_)
