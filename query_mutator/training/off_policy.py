"""Off-policy training: a collector thread steps the environments while one learner learns.

In a rollout every environment takes `num_steps` steps; between rollouts nothing is in flight, so a checkpoint holds a
whole state. Within one, an environment continues as soon as its step has finished, acting by the newest weights. Steps
reach the learner, which is the calling thread, through a queue. It observes them before it learns, unless more than
`max_pending_updates` gradient steps are due: then the queue fills and the collector waits.

A run that was killed goes through the same episodes and never repeats a completed call; its learner may see the steps
in another order, which makes no difference to one that learns in `update` alone, whatever the order.
"""

from __future__ import annotations

import queue
import threading
import time
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any

from query_mutator.env.steps import Steps
from query_mutator.learners.learner import Learner
from query_mutator.training.collector import Collector
from query_mutator.training.loop import AsyncVectorEnv, OnSteps
from query_mutator.types import FloatArray

__all__ = ["OffPolicyLoop"]

POLL_S = 0.2  # between two checks whether the collector has failed


class OffPolicyLoop(Collector):
    """Collects and learns, one rollout at a time; `close` stops the collector."""

    _learner: Learner

    def __init__(
        self,
        envs: AsyncVectorEnv,
        learner: Learner,
        obs: FloatArray | None,
        *,
        on_steps: OnSteps,
        max_pending_updates: int = 8,
        **settings: Any,
    ) -> None:
        """Take the arguments of a Collector, and the callback for finished steps."""
        super().__init__(envs, learner, obs, **settings)
        if obs is None:
            learner.forget_pending()
        self._on_steps, self._max_pending_updates = on_steps, max_pending_updates
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
        busy = max(1e-9, time.perf_counter() - self._began)
        shares = {
            "perf/learner_share_training": self._training_s / busy,
            "perf/learner_share_waiting": self._waiting_s / busy,
        }
        self._mark()
        return {**self._learner.update(), **shares}

    def close(self) -> None:
        """Stop the collector; its calls must have been cancelled through the client. Idempotent."""
        self._stopped.set()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _mark(self) -> None:
        """Start measuring where the learner's time goes."""
        self._began, self._training_s, self._waiting_s = time.perf_counter(), 0.0, 0.0

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
        self._waiting_s += time.perf_counter() - began
        self._learner.observe(steps)
        self._on_steps(infos, steps)
        return len(steps.env_ids)

    def _learn(self) -> None:
        began = time.perf_counter()
        self._learner.learn()
        self._training_s += time.perf_counter() - began
