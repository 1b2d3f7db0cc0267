"""Rounds of an off-policy run: collector threads step the environments while one learner learns.

    N environments shared evenly by C collectors, n of them ready, O observation

In a round every environment takes `num_steps` steps; between rounds nothing is under way, so a checkpoint holds a
whole state. Within one, an environment goes on as soon as its step is back, acting by the newest weights. Steps reach
the learner, which is the calling thread, through one queue; it takes them in before it learns, unless it is behind by
more than `max_update_debt` gradient steps: then the queue fills and collectors wait.

Every action is in the journal before its step begins, and one that is found there is taken again. So a run that was
killed goes through the same episodes without a call made twice; its learner may see their steps in another order.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from query_mutator.iqn.steps import FloatArray, Steps
from query_mutator.training.collector import OnSteps, carried_out
from query_mutator.training.journal import Journal
from rl_query_mutator_env import BatchedQueryMutationEnv, QueryMutationEnv

PATIENCE_S = 0.2  # between two looks at whether a collector has failed


class Learner(Protocol):
    """Learns from steps as they come; acts by the weights it handed over last."""

    version: int  # gradient steps behind the weights that act
    updates_done: int  # whole rounds learned from

    @property
    def updates_owed(self) -> int:
        """Return the gradient steps that are still to be taken for the steps there are."""

    def act(self, obs: FloatArray, env_ids: Sequence[int]) -> NDArray[np.int64]:
        """Return actions [n] in environments `env_ids`, which see obs [n, O]; called by many threads."""

    def observe(self, steps: Steps) -> None:
        """Take in steps."""

    def learn(self) -> None:
        """Take one gradient step."""

    def hand_over(self) -> None:
        """Have today's weights act from here on."""

    def forget_pending(self) -> None:
        """Drop steps that wait for what follows: the environments begin new episodes."""

    def stats(self) -> dict[str, float]:
        """Return the figures since the last call under their metric keys."""


class Group:
    """The environments of one collector, and their observations [n, O] between two rounds."""

    def __init__(
        self,
        envs: BatchedQueryMutationEnv,
        first: int,
        learner: Learner,
        obs: FloatArray | None,
        *,
        journal: Journal | None = None,
    ) -> None:
        """Take environments that are numbers `first` and following of the run; without `obs` they begin anew."""
        self.envs, self._learner, self._obs, self._journal = envs, learner, obs, journal
        self._ids = np.arange(first, first + envs.num_envs)
        self._actions = np.zeros(envs.num_envs, dtype=np.int64)
        self._versions = np.zeros(envs.num_envs, dtype=np.int64)

    def run(self, num_steps: int, *, seed: int, put: Callable[[tuple[Steps, dict[str, Any]]], bool]) -> None:
        """Take `num_steps` in each environment and hand them to `put`, until that returns False."""
        if self._obs is None:
            self._obs, _ = self.envs.reset(seed=seed + int(self._ids[0]))
        left = np.full(self.envs.num_envs, num_steps)
        self._send(np.arange(self.envs.num_envs))
        while left.any():
            obs, rewards, terminations, truncations, infos = self.envs.recv()
            ready = infos["env_id"]
            left[ready] -= 1
            if not put((self._steps(ready, obs, rewards, terminations, truncations, infos), infos)):
                return
            self._obs[ready] = obs
            self._send(ready[left[ready] > 0])

    def _send(self, envs: NDArray[np.int64]) -> None:
        if not len(envs):
            return
        assert self._obs is not None
        self._versions[envs] = self._learner.version
        actions = self._learner.act(self._obs[envs], self._ids[envs].tolist())
        if self._journal is not None:
            actions = self._journal.settle(self.envs.places(envs), actions)
        self._actions[envs] = actions
        self.envs.send(self._actions[envs], envs)

    def _steps(
        self,
        ready: NDArray[np.int64],
        obs: FloatArray,
        rewards: NDArray[np.float64],
        terminations: NDArray[np.bool_],
        truncations: NDArray[np.bool_],
        infos: dict[str, Any],
    ) -> Steps:
        assert self._obs is not None
        last, ended = obs.copy(), terminations | truncations
        if ended.any():
            last[ended] = np.stack(infos["final_obs"][ended])
        return Steps(
            env_ids=self._ids[ready],
            obs=self._obs[ready],  # an indexed copy
            actions=self._actions[ready],
            rewards=rewards,
            next_obs=last,
            terminations=terminations,
            truncations=truncations,
            valid=carried_out(infos),
            versions=self._versions[ready],
        )


class EnvGroups:
    """All environments of a run, in the groups that its collectors step; none in the middle of a step."""

    def __init__(
        self,
        envs: Sequence[QueryMutationEnv],
        batch_size: int | None,
        *,
        num_groups: int,
        journal: Journal | None = None,
    ) -> None:
        """Share environments evenly: the sizes of two groups differ by one at most."""
        bounds = np.linspace(0, len(envs), num_groups + 1).round().astype(int).tolist()
        shares = [envs[first:last] for first, last in itertools.pairwise(bounds)]
        workers = [None if batch_size is None else min(batch_size, len(share)) for share in shares]
        self.groups = [
            BatchedQueryMutationEnv(share, size, journal=journal) for share, size in zip(shares, workers, strict=True)
        ]
        self.envs = list(envs)

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the states of all environments."""
        return [env.state_dict() for env in self.envs]

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> FloatArray | None:
        """Go on where `state_dict` was taken; return the observations [N, O], None before the first reset."""
        rest = iter(states)
        obs = [group.load_state_dict(list(itertools.islice(rest, group.num_envs))) for group in self.groups]
        known = [rows for rows in obs if rows is not None]
        return np.concatenate(known) if len(known) == len(obs) else None

    def close(self) -> None:
        """End all workers and environments; idempotent."""
        for group in self.groups:
            group.close()


class OffPolicyRounds:
    """Collects and learns, a round at a time; `close` ends the collectors."""

    def __init__(
        self,
        groups: Sequence[BatchedQueryMutationEnv],
        learner: Learner,
        obs: FloatArray | None,
        *,
        seed: int,
        num_steps: int,
        on_steps: OnSteps,
        max_update_debt: int = 8,
        journal: Journal | None = None,
    ) -> None:
        """Take the environments of each collector; without observations `obs` [N, O] they begin anew, seeded."""
        firsts = np.cumsum([0, *(group.num_envs for group in groups)])
        self._groups = [
            Group(
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
        self._seed, self._num_steps, self._round_steps = seed, num_steps, int(firsts[-1]) * num_steps
        self._max_update_debt = max_update_debt
        self._arrived: queue.Queue[tuple[Steps, dict[str, Any]]] = queue.Queue(maxsize=len(groups))
        self._stopped = threading.Event()
        self._threads = ThreadPoolExecutor(max_workers=len(groups), thread_name_prefix="qm-collect")
        self._mark()

    def collect(self) -> None:
        """Have every environment take its steps, learning meanwhile; what a collector raises is raised here."""
        running = [
            self._threads.submit(group.run, self._num_steps, seed=self._seed, put=self._put) for group in self._groups
        ]
        missing = self._round_steps
        while missing or self._learner.updates_owed:
            owed = self._learner.updates_owed
            if owed and (not missing or owed > self._max_update_debt or self._arrived.empty()):
                self._learn()
            else:
                missing -= self._take(running)
        for one in running:
            one.result()

    def update(self) -> dict[str, float]:
        """Return what was learned in the round, and where the learner's time went."""
        busy = max(1e-9, time.perf_counter() - self._began)
        shares = {
            "perf/learner_share_training": self._training_s / busy,
            "perf/learner_share_waiting": self._waiting_s / busy,
        }
        self._mark()
        self._learner.updates_done += 1
        self._learner.hand_over()  # whatever --sync-every: what is evaluated and saved is what there is
        return {**self._learner.stats(), **shares}

    def close(self) -> None:
        """Stop the collectors, whose calls must have been cancelled through the client; idempotent."""
        self._stopped.set()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _mark(self) -> None:
        """Begin to measure where the learner's time goes."""
        self._began, self._training_s, self._waiting_s = time.perf_counter(), 0.0, 0.0

    def _put(self, item: tuple[Steps, dict[str, Any]]) -> bool:
        while not self._stopped.is_set():
            try:
                self._arrived.put(item, timeout=PATIENCE_S)
                return True
            except queue.Full:
                continue
        return False

    def _take(self, running: Sequence[Future[None]]) -> int:
        """Wait for the next steps and take them in; return how many."""
        began = time.perf_counter()
        while True:
            try:
                steps, infos = self._arrived.get(timeout=PATIENCE_S)
                break
            except queue.Empty:
                for one in running:
                    if one.done():
                        one.result()
        self._waiting_s += time.perf_counter() - began
        self._learner.observe(steps)
        self._on_steps(infos, steps.terminations | steps.truncations, steps.valid)
        return len(steps.env_ids)

    def _learn(self) -> None:
        began = time.perf_counter()
        self._learner.learn()
        self._training_s += time.perf_counter() - began
