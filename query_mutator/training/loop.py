"""The middle of the trainer: collect a rollout and learn, for on-policy and off-policy learners.

    N environments, n of them ready, O observation

A rollout's only barrier is its end: every environment takes `num_steps` steps. The quota is per environment, because
stopping at a total count would over-sample short (refused) episodes. Between rollouts nothing is in flight, so a
checkpoint holds a whole state. Every action is stored before its step starts, and a resumed run takes the
actions it finds there: where acting is not deterministic, the last bits of a probability could lead to another action.

On-policy: the policy is frozen during a rollout and every environment has its own random stream, so the data equal
those of lock-step. Off-policy: a collector thread steps the environments, which act by the newest weights, while the
calling thread learns. Steps reach the learner through a queue; it observes them before it learns, unless more than
`max_pending_updates` gradient steps are due: then the queue fills and the collector waits. A run that was killed goes
through the same episodes and never repeats a completed call; its learner may see the steps in another order, which
makes no difference to one that learns in `update` alone, whatever the order.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ppo.collect import NotFiniteError, require_finite
from query_mutator.env.vector import of_step, rows_of
from query_mutator.errors import UsageError
from query_mutator.learners.learner import Learner, Steps, last_obs
from query_mutator.learners.named import LEARNERS
from query_mutator.llm.store import Store
from query_mutator.training.config import TrainConfig
from query_mutator.types import FloatArray

GROUP_ENVS = 16  # received at once: when hundreds are ready, the first must not wait for the last
POLL_S = 0.2  # between two checks whether the collector has failed

Received = tuple[FloatArray, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]

#: Callback for finished steps, with their infos.
OnSteps = Callable[[dict[str, Any], Steps], None]


def make_loop(
    config: TrainConfig, envs: Any, learner: Learner, obs: FloatArray | None, *, on_steps: OnSteps, store: Store | None
) -> TrainingLoop:
    """Return the loop of the learner's kind; it continues from observations [N, O], None for new episodes."""
    common: dict[str, Any] = {"num_steps": config.num_steps, "on_steps": on_steps, "store": store}
    common["seed"] = envs_seed(config.seed)
    if LEARNERS.get(config.algo).on_policy:
        return TrainingLoop(envs, learner, obs, **common)
    return OffPolicyLoop(envs, learner, obs, max_pending_updates=config.max_pending_updates, **common)


def envs_seed(seed: int) -> int:
    """Return the first environment's seed, to which the others add their number.

    It is not `seed` itself: runs with adjacent seeds would share most environments and not be independent repeats.
    """
    return int(np.random.SeedSequence([seed, 0]).generate_state(1)[0])


class TrainingLoop:
    """Collects a rollout under a frozen policy, then learns from it.

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
    ) -> None:
        self._envs, self._learner, self._store, self._on_steps = envs, learner, store, on_steps
        num_envs, (obs_dim,) = envs.num_envs, envs.single_observation_space.shape or (0,)
        self._reset_seed = seed if obs is None else None
        self._obs = np.zeros((num_envs, obs_dim), dtype=np.float32) if obs is None else obs
        self._num_steps = num_steps
        self._steps_taken = np.zeros(num_envs, dtype=np.int64)  # [N] since the present rollout started
        self._actions = np.zeros(num_envs, dtype=np.int64)
        self._versions = np.zeros(num_envs, dtype=np.int64)  # of the policy that chose the action
        self._waited_s = 0.0

    def collect(self) -> None:
        """Take `num_steps` steps in every environment."""
        started = time.perf_counter()
        self._take_steps()
        self._waited_s = time.perf_counter() - started

    def update(self) -> dict[str, float]:
        """Finish the rollout and return its statistics under their metric keys."""
        started = time.perf_counter()
        stats = self._learner.update()
        trained_s = time.perf_counter() - started
        return {**stats, **_shares(trained_s, self._waited_s, trained_s + self._waited_s)}

    def close(self) -> None:
        """Stop background threads; idempotent."""

    def _take_steps(self) -> None:
        """Take `num_steps` steps in every environment."""
        self._start()
        while (self._steps_taken < self._num_steps).any():
            self._receive(self._envs.recv(max_envs=GROUP_ENVS))
        self._steps_taken[:] = 0

    def _finished(self, steps: Steps, infos: dict[str, Any]) -> None:
        """Take steps [n] that have finished."""
        self._learner.observe(steps)
        self._on_steps(infos, steps)

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
            calls=of_step(infos, "step_calls"),
        )
        self._require_finite("last observation", envs, steps.next_obs)
        self._finished(steps, infos)
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
        if self._store is not None:
            actions = np.array(self._store.replay(self._envs.step_ids(envs), actions.tolist()), dtype=np.int64)
        self._actions[envs] = actions
        self._envs.send(actions, envs)


def _shares(training_s: float, waiting_s: float, of_s: float) -> dict[str, float]:
    """Return where the learner's time went, under the metric keys."""
    of_s = max(1e-9, of_s)
    return {"perf/learner_share_training": training_s / of_s, "perf/learner_share_waiting": waiting_s / of_s}


class OffPolicyLoop(TrainingLoop):
    """Collects and learns at the same time, one rollout after the other; `close` stops the collector."""

    def __init__(
        self, envs: Any, learner: Learner, obs: FloatArray | None, *, max_pending_updates: int = 8, **settings: Any
    ) -> None:
        """Take the arguments of a TrainingLoop, and the gradient steps that may be due while steps wait."""
        super().__init__(envs, learner, obs, **settings)
        self._max_pending_updates = max_pending_updates
        self._queue: queue.Queue[tuple[Steps, dict[str, Any]]] = queue.Queue(maxsize=1)
        self._stopped = threading.Event()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="qm-collect")
        self._mark()

    def collect(self) -> None:
        """Take `num_steps` steps in every environment, learning meanwhile; errors of the collector are raised here."""
        running = self._thread.submit(self._take_steps)
        missing = self._num_steps * self._envs.num_envs
        while missing or self._learner.pending_updates:
            pending = self._learner.pending_updates
            if pending and (not missing or pending > self._max_pending_updates or self._queue.empty()):
                self._learn()
            else:
                missing -= self._take(running)
        running.result()

    def update(self) -> dict[str, float]:
        """Return the statistics of the rollout and where the learner's time went."""
        shares = _shares(self._training_s, self._waited_s, time.perf_counter() - self._began)
        self._mark()
        return {**self._learner.update(), **shares}

    def close(self) -> None:
        """Stop the collector; its calls must have been cancelled through the client. Idempotent."""
        self._stopped.set()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _mark(self) -> None:
        """Start measuring where the learner's time goes."""
        self._began, self._training_s, self._waited_s = time.perf_counter(), 0.0, 0.0

    def _finished(self, steps: Steps, infos: dict[str, Any]) -> None:
        while not self._stopped.is_set():
            try:
                self._queue.put((steps, infos), timeout=POLL_S)
                return
            except queue.Full:
                continue
        raise CancelledError

    def _take(self, running: Future[None]) -> int:
        """Wait for the next steps and observe them; return how many."""
        began = time.perf_counter()
        while True:
            try:
                steps, infos = self._queue.get(timeout=POLL_S)
                break
            except queue.Empty:
                if running.done():
                    running.result()
        self._waited_s += time.perf_counter() - began
        super()._finished(steps, infos)
        return len(steps.env_ids)

    def _learn(self) -> None:
        began = time.perf_counter()
        self._learner.learn()
        self._training_s += time.perf_counter() - began
