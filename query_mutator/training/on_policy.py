"""On-policy training: a rollout whose only barrier is its end, then an update.

The policy is frozen during a rollout and every environment has its own random stream, so the data equal those of
lock-step. The quota of steps is per environment: stopping at a total count would over-sample short (refused) episodes.
"""

from __future__ import annotations

import time
from typing import Any

from query_mutator.env.steps import Steps
from query_mutator.learners.learner import RolloutLearner
from query_mutator.training.collector import Collector
from query_mutator.training.loop import AsyncVectorEnv, OnSteps
from query_mutator.types import FloatArray

__all__ = ["OnPolicyLoop"]


class OnPolicyLoop(Collector):
    """Collects rollouts and learns from each."""

    _learner: RolloutLearner

    def __init__(
        self,
        envs: AsyncVectorEnv,
        learner: RolloutLearner,
        obs: FloatArray | None,
        *,
        on_steps: OnSteps,
        **settings: Any,
    ) -> None:
        """Take the arguments of a Collector, and the callback for finished steps."""
        super().__init__(envs, learner, obs, **settings)
        self._on_steps = on_steps
        self._waited_s = 0.0

    def collect(self) -> None:
        """Take `num_steps` steps in every environment under the frozen policy."""
        started = time.perf_counter()
        self._take_steps()
        self._waited_s = time.perf_counter() - started

    def update(self) -> dict[str, float]:
        """Learn from the rollout and return its statistics under their metric keys."""
        started = time.perf_counter()
        stats = self._learner.update()
        trained_s = time.perf_counter() - started
        busy_s = max(1e-9, trained_s + self._waited_s)
        return {
            **stats,
            "perf/learner_share_training": trained_s / busy_s,
            "perf/learner_share_waiting": self._waited_s / busy_s,
        }

    def close(self) -> None:
        """Do nothing: there are no background threads."""

    def _finished(self, steps: Steps, infos: dict[str, Any]) -> None:
        self._learner.observe(steps)
        self._on_steps(infos, steps)
