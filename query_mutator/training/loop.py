"""The middle of the trainer: collect a rollout and learn.

    N environments, n of them ready, O observation

A rollout's only barrier is its end: every environment takes `num_steps` steps. The quota is per environment, because
stopping at a total count would over-sample short (refused) episodes. Between rollouts nothing is in flight, so a
checkpoint holds a whole state. Every action is stored before its step starts, and a resumed run takes the
actions it finds there: where acting is not deterministic, the last bits of a probability could lead to another action.

On-policy: the policy is frozen during a rollout and every environment has its own random stream, so the data equal
those of lock-step. Off-policy: gradient steps are taken while calls are in flight and no step has finished, and before
further steps are taken once more than `max_pending_updates` are due. A run that was killed goes through the same
episodes and never repeats a completed call; its learner may see the steps in another order, which makes no difference
to one that learns in `update` alone, whatever the order.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ppo.collect import NotFiniteError, require_finite
from query_mutator.env.vector import of_step, rows_of
from query_mutator.errors import UsageError
from query_mutator.learners.learner import Learner, Steps, last_obs
from query_mutator.llm.store import Store
from query_mutator.types import FloatArray

GROUP_ENVS = 16  # received at once: when hundreds are ready, the first must not wait for the last

Received = tuple[FloatArray, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]

#: Callback for finished steps, with their infos.
OnSteps = Callable[[dict[str, Any], Steps], None]


def envs_seed(seed: int) -> int:
    """Return the first environment's seed, to which the others add their number.

    It is not `seed` itself: runs with adjacent seeds would share most environments and not be independent repeats.
    """
    return int(np.random.SeedSequence([seed, 0]).generate_state(1)[0])


class TrainingLoop:
    """Collects a rollout, and learns from it meanwhile or at its end, as the learner does.

    Holds the current observations [N, O]; resets the environments, a `BatchedQueryMutationEnv`, if `obs` is None;
    `seed` is that of the first.
    """

    def __init__(
        self,
        envs: Any,
        learner: Learner,
        obs: FloatArray | None,
        *,
        seed: int,
        num_steps: int,
        on_steps: OnSteps,
        store: Store | None = None,
        max_pending_updates: int = 8,
    ) -> None:
        self._envs, self._learner, self._store, self._on_steps = envs, learner, store, on_steps
        num_envs, (obs_dim,) = envs.num_envs, envs.single_observation_space.shape or (0,)
        self._reset_seed = seed if obs is None else None
        self._obs = np.zeros((num_envs, obs_dim), dtype=np.float32) if obs is None else obs
        self._num_steps, self._max_pending_updates = num_steps, max_pending_updates
        self._steps_taken = np.zeros(num_envs, dtype=np.int64)  # [N] since the present rollout started
        self._actions = np.zeros(num_envs, dtype=np.int64)
        self._versions = np.zeros(num_envs, dtype=np.int64)  # of the policy that chose the action
        self._began, self._training_s, self._waited_s = time.perf_counter(), 0.0, 0.0

    def collect(self) -> None:
        """Take `num_steps` steps in every environment, and the gradient steps that are due."""
        began = time.perf_counter()
        self._take_steps()
        self._waited_s = time.perf_counter() - began - self._training_s

    def update(self) -> dict[str, float]:
        """Finish the rollout; return its statistics and where the learner's time went, under their metric keys."""
        began = time.perf_counter()
        stats = self._learner.update()
        now = time.perf_counter()
        self._training_s += now - began
        of_s = max(1e-9, now - self._began)
        shares = {
            "perf/learner_share_training": self._training_s / of_s,
            "perf/learner_share_waiting": self._waited_s / of_s,
        }
        self._began, self._training_s = now, 0.0
        return {**stats, **shares}

    def _learn(self) -> None:
        began = time.perf_counter()
        self._learner.learn()
        self._training_s += time.perf_counter() - began

    def _take_steps(self) -> None:
        self._start()
        while (self._steps_taken < self._num_steps).any():
            pending = self._learner.pending_updates
            if pending <= self._max_pending_updates:
                received = self._envs.recv(max_envs=GROUP_ENVS, waits=not pending)
                if len(received[1]):
                    self._receive(received)
                    continue
            self._learn()
        while self._learner.pending_updates:
            self._learn()
        self._steps_taken[:] = 0

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
        """Hand finished steps [n] to the learner: what was received, and what led to it."""
        next_obs, rewards, terminations, truncations, infos = received
        steps = Steps(
            env_ids=envs,
            obs=self._obs[envs],
            actions=self._actions[envs],
            rewards=rewards,
            next_obs=last_obs(next_obs, terminations | truncations, infos),
            terminations=terminations,
            truncations=truncations,
            valid=of_step(infos, "valid"),
            versions=self._versions[envs],
            calls=of_step(infos, "step_cost"),
        )
        self._require_finite("last observation", envs, steps.next_obs)
        self._learner.observe(steps)
        self._on_steps(infos, steps)
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
        self._versions[envs] = self._learner.version
        actions = self._learner.act(self._obs[envs], envs.tolist())
        if self._store is not None:
            actions = np.array(self._store.replay(self._envs.step_ids(envs), actions.tolist()), dtype=np.int64)
        self._actions[envs] = actions
        self._envs.send(actions, envs)
