"""Off-policy training: collector threads step the environments while one learner learns.

    N environments shared evenly by C collectors, n of them ready, O observation

In a rollout every environment takes `num_steps` steps; between rollouts nothing is in flight, so a checkpoint holds a
whole state. Within one, an environment continues as soon as its step has finished, acting by the newest weights. Steps
reach the learner, which is the calling thread, through one queue. It observes them before it learns, unless more than
`max_pending_updates` gradient steps are due: then the queue fills and collectors wait.

Every action is in the journal before its step starts, and a resumed run takes the actions it finds there. So a run that
was killed goes through the same episodes and never repeats a completed call; its learner may see the steps in another
order, which makes no difference to one that learns in `update` alone, whatever the order.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from query_mutator.env.steps import Steps
from query_mutator.learners.learner import Learner
from query_mutator.training.loop import ActionJournal, AsyncVectorEnv, OnSteps, make_steps
from query_mutator.types import FloatArray

__all__ = ["EnvGroups", "OffPolicyLoop"]

T = TypeVar("T")

POLL_S = 0.2  # between two checks whether a collector has failed


class _Collector:
    """Steps the environments of one thread. Holds their observations [n, O]; resets them first if `obs` is None."""

    def __init__(
        self,
        envs: AsyncVectorEnv,
        first: int,
        learner: Learner,
        obs: FloatArray | None,
        *,
        journal: ActionJournal | None = None,
    ) -> None:
        """Take environments, which are numbers `first` and up of the run."""
        self.envs, self._learner, self._obs, self._journal = envs, learner, obs, journal
        self._ids = np.arange(first, first + envs.num_envs)
        self._actions = np.zeros(envs.num_envs, dtype=np.int64)
        self._versions = np.zeros(envs.num_envs, dtype=np.int64)

    def run(self, num_steps: int, *, seed: int, put: Callable[[tuple[Steps, dict[str, Any]]], bool]) -> None:
        """Take `num_steps` in each environment and pass them to `put`, until that returns False."""
        if self._obs is None:
            self._obs, _ = self.envs.reset(seed=seed + int(self._ids[0]))
        left = np.full(self.envs.num_envs, num_steps)
        self._send(np.arange(self.envs.num_envs))
        while left.any():
            received = self.envs.recv()
            infos = received[4]
            ready = infos["env_id"]
            left[ready] -= 1
            steps = make_steps(
                received,
                env_ids=self._ids[ready],
                obs=self._obs[ready],  # an indexed copy
                actions=self._actions[ready],
                versions=self._versions[ready],
            )
            if not put((steps, infos)):
                return
            self._obs[ready] = received[0]
            self._send(ready[left[ready] > 0])

    def _send(self, envs: NDArray[np.int64]) -> None:
        if not len(envs):
            return
        assert self._obs is not None
        self._versions[envs] = self._learner.version
        actions = self._learner.act(self._obs[envs], self._ids[envs].tolist())
        if self._journal is not None:
            actions = self._journal.replay(self.envs.step_ids(envs), actions)
        self._actions[envs] = actions
        self.envs.send(actions, envs)


class EnvGroups:
    """All environments of a run, in the groups that its collectors step."""

    def __init__(self, groups: Sequence[AsyncVectorEnv]) -> None:
        self.groups = list(groups)

    @staticmethod
    def split(items: Sequence[T], num_groups: int) -> list[Sequence[T]]:
        """Return `items` in groups whose sizes differ by at most one."""
        bounds = np.linspace(0, len(items), num_groups + 1).round().astype(int).tolist()
        return [items[first:last] for first, last in itertools.pairwise(bounds)]

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the states of all environments; none may be in the middle of a step."""
        return [state for group in self.groups for state in group.state_dict()]

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> FloatArray | None:
        """Restore `state_dict`; return the observations [N, O], None before the first reset."""
        rest = iter(states)
        obs = [group.load_state_dict(list(itertools.islice(rest, group.num_envs))) for group in self.groups]
        known = [rows for rows in obs if rows is not None]
        return np.concatenate(known) if len(known) == len(obs) else None

    def close(self) -> None:
        """Close all environments; idempotent."""
        for group in self.groups:
            group.close()


class OffPolicyLoop:
    """Collects and learns, one rollout at a time; `close` stops the collectors."""

    def __init__(
        self,
        groups: Sequence[AsyncVectorEnv],
        learner: Learner,
        obs: FloatArray | None,
        *,
        seed: int,
        num_steps: int,
        on_steps: OnSteps,
        max_pending_updates: int = 8,
        journal: ActionJournal | None = None,
    ) -> None:
        """Take the environments of each collector; if `obs` [N, O] is None, they are reset with `seed`."""
        firsts = np.cumsum([0, *(group.num_envs for group in groups)])
        self._groups = [
            _Collector(
                envs,
                first,
                learner,
                None if obs is None else obs[first : first + envs.num_envs].copy(),
                journal=journal,
            )
            for envs, first in zip(groups, firsts[:-1].tolist(), strict=True)
        ]
        if obs is None:
            learner.forget_pending()
        self._learner, self._on_steps = learner, on_steps
        self._seed, self._num_steps, self._rollout_steps = seed, num_steps, int(firsts[-1]) * num_steps
        self._max_pending_updates = max_pending_updates
        self._finished: queue.Queue[tuple[Steps, dict[str, Any]]] = queue.Queue(maxsize=len(groups))
        self._stopped = threading.Event()
        self._threads = ThreadPoolExecutor(max_workers=len(groups), thread_name_prefix="qm-collect")
        self._mark()

    def collect(self) -> None:
        """Take `num_steps` steps in every environment, learning meanwhile; errors of a collector are raised here."""
        running = [
            self._threads.submit(group.run, self._num_steps, seed=self._seed, put=self._put) for group in self._groups
        ]
        missing = self._rollout_steps
        while missing or self._learner.pending_updates:
            pending = self._learner.pending_updates
            if pending and (not missing or pending > self._max_pending_updates or self._finished.empty()):
                self._learn()
            else:
                missing -= self._take(running)
        for one in running:
            one.result()

    def update(self) -> dict[str, float]:
        """Return the statistics of the rollout and where the learner's time went."""
        busy = max(1e-9, time.perf_counter() - self._began)
        shares = {
            "perf/learner_share_training": self._training_s / busy,
            "perf/learner_share_waiting": self._waiting_s / busy,
        }
        self._mark()
        return {**self._learner.update(), **shares}

    def close(self) -> None:
        """Stop the collectors; their calls must have been cancelled through the client. Idempotent."""
        self._stopped.set()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _mark(self) -> None:
        """Start measuring where the learner's time goes."""
        self._began, self._training_s, self._waiting_s = time.perf_counter(), 0.0, 0.0

    def _put(self, item: tuple[Steps, dict[str, Any]]) -> bool:
        while not self._stopped.is_set():
            try:
                self._finished.put(item, timeout=POLL_S)
                return True
            except queue.Full:
                continue
        return False

    def _take(self, running: Sequence[Future[None]]) -> int:
        """Wait for the next steps and observe them; return how many."""
        began = time.perf_counter()
        while True:
            try:
                steps, infos = self._finished.get(timeout=POLL_S)
                break
            except queue.Empty:
                for one in running:
                    if one.done():
                        one.result()
        self._waiting_s += time.perf_counter() - began
        self._learner.observe(steps)
        self._on_steps(infos, steps)
        return len(steps.env_ids)

    def _learn(self) -> None:
        began = time.perf_counter()
        self._learner.learn()
        self._training_s += time.perf_counter() - began
