"""What collects a rollout, for learners of both kinds: the steps of all environments, whose only barrier is the end.

    N environments, n of them ready, O observation

Every action is in the journal before its step starts. A resumed run takes the actions it finds there: where acting is
not deterministic, the last bits of a probability could lead to another action.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ppo.collect import NotFiniteError, require_finite
from query_mutator.env.infos import rows_of
from query_mutator.env.steps import Steps
from query_mutator.errors import UsageError
from query_mutator.learners.learner import RolloutLearner
from query_mutator.training.loop import ActionJournal, AsyncVectorEnv, Received, make_steps
from query_mutator.types import FloatArray

__all__ = ["Collector"]

GROUP_ENVS = 16  # received at once: when hundreds are ready, the first must not wait for the last


class Collector:
    """Steps the environments. Holds the current observations [N, O]; resets the environments if `obs` is None."""

    def __init__(
        self,
        envs: AsyncVectorEnv,
        learner: RolloutLearner,
        obs: FloatArray | None,
        *,
        seed: int,
        num_steps: int,
        journal: ActionJournal | None = None,
    ) -> None:
        self._envs, self._learner, self._journal = envs, learner, journal
        num_envs, (obs_dim,) = envs.num_envs, envs.single_observation_space.shape or (0,)
        self._reset_seed = seed if obs is None else None
        self._obs = np.zeros((num_envs, obs_dim), dtype=np.float32) if obs is None else obs
        self._num_steps = num_steps
        self._steps_taken = np.zeros(num_envs, dtype=np.int64)  # [N] since the present rollout started
        self._actions = np.zeros(num_envs, dtype=np.int64)
        self._versions = np.zeros(num_envs, dtype=np.int64)  # of the policy that chose the action

    def _take_steps(self) -> None:
        """Take `num_steps` steps in every environment."""
        self._start()
        while (self._steps_taken < self._num_steps).any():
            self._receive(self._envs.recv(max_envs=GROUP_ENVS))
        self._steps_taken[:] = 0

    def _finished(self, steps: Steps, infos: dict[str, Any]) -> None:
        """Take steps [n] that have finished."""
        raise NotImplementedError

    def _start(self) -> None:
        if self._reset_seed is None:
            self._send(np.arange(self._envs.num_envs))
            return
        self._envs.send_reset(seed=self._reset_seed)
        self._reset_seed = None

    def _receive(self, received: Received) -> None:
        """Hand over finished steps [n] and start the next ones; a reset is not a step."""
        ready, infos = received[4]["env_id"], received[4]
        self._require_finite("reward", ready, received[1])
        self._require_finite("observation", ready, received[0])
        stepped = ~infos.get("reset", np.zeros(len(ready), dtype=np.bool_))
        if stepped.all():
            self._step(ready, received)
        elif stepped.any():
            columns = [column[stepped] for column in received[:4]]
            self._step(ready[stepped], (*columns, rows_of(infos, stepped)))
        self._obs[ready] = received[0]
        self._send(ready[self._steps_taken[ready] < self._num_steps])

    def _step(self, envs: NDArray[np.int64], received: Received) -> None:
        steps = make_steps(
            received,
            env_ids=envs,
            obs=self._obs[envs],
            actions=self._actions[envs],
            versions=self._versions[envs],
        )
        self._require_finite("last observation", envs, steps.next_obs)
        self._finished(steps, received[4])
        self._steps_taken[envs] += 1

    def _require_finite(self, what: str, envs: NDArray[np.int64], values: NDArray[Any]) -> None:
        """Raise a UsageError unless what environments returned is finite."""
        try:
            require_finite(what, values, lambda row: self._envs.step_ids(envs[row : row + 1])[0])
        except NotFiniteError as error:
            raise UsageError(str(error)) from None

    def _send(self, envs: NDArray[np.int64]) -> None:
        """Choose actions in these environments and start their steps."""
        if not len(envs):
            return
        self._versions[envs] = self._learner.version  # before it acts: another thread may update it
        actions = self._learner.act(self._obs[envs], envs.tolist())
        if self._journal is not None:
            actions = self._journal.replay(self._envs.step_ids(envs), actions)
        self._actions[envs] = actions
        self._envs.send(actions, envs)
