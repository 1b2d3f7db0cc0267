"""The middle of the trainer's loop, collect and update, for learners that wait for a rollout and those that do not."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

from ppo.algorithm import PPO
from query_mutator.training.collector import Collector
from query_mutator.training.off_policy import EnvGroups, OffPolicyRounds

if TYPE_CHECKING:
    from ppo.policy import FloatArray
    from query_mutator.training.collector import OnSteps
    from query_mutator.training.config import TrainConfig
    from query_mutator.training.journal import Journal
    from query_mutator.training.learners import AnyLearner
    from rl_query_mutator_env import BatchedQueryMutationEnv


class Rounds(Protocol):
    """Lets every environment take its steps, learns from them, and says what came of it."""

    def collect(self) -> None:
        """Have every environment take `num_steps`; an off-policy learner learns meanwhile."""

    def update(self) -> dict[str, float]:
        """Learn from what was collected, and return the round's figures under their metric keys."""

    def close(self) -> None:
        """End what runs in other threads; idempotent."""


class OnPolicyRounds:
    """Collects a rollout, then learns from it: one waits for the other."""

    def __init__(self, collector: Collector, ppo: PPO, *, max_policy_lag: int) -> None:
        self._collector, self._ppo, self._is_stale = collector, ppo, max_policy_lag > 0

    def collect(self) -> None:
        """Let every environment take its `num_steps` under the frozen policy."""
        began = time.perf_counter()
        self._rollout = self._collector.collect()
        self._waited_s = time.perf_counter() - began

    def update(self) -> dict[str, float]:
        """Learn from the rollout."""
        began = time.perf_counter()
        rollout = self._rollout
        stats = self._ppo.update(rollout.buffer, rollout.next_obs, stale=self._is_stale)
        trained_s = time.perf_counter() - began
        busy_s = max(1e-9, trained_s + self._waited_s)
        return {
            **stats,
            "losses/policy_lag": rollout.policy_lag,
            "perf/learner_share_training": trained_s / busy_s,
            "perf/learner_share_waiting": self._waited_s / busy_s,
        }

    def close(self) -> None:
        """Nothing runs in other threads."""


def make_rounds(
    config: TrainConfig,
    envs: BatchedQueryMutationEnv | EnvGroups,
    learner: AnyLearner,
    obs: FloatArray | None,
    *,
    seed: int,
    on_steps: OnSteps,
    journal: Journal | None,
) -> Rounds:
    """Return the loop of a learner; without observations `obs` [N, O] the environments begin anew, seeded."""
    if isinstance(envs, EnvGroups):
        assert not isinstance(learner, PPO)
        return OffPolicyRounds(
            envs.groups,
            learner,
            obs,
            seed=seed,
            num_steps=config.num_steps,
            on_steps=on_steps,
            max_update_debt=config.max_update_debt,
            journal=journal,
        )
    assert isinstance(learner, PPO)
    lag = config.max_policy_lag
    collector = Collector(
        envs,
        learner,
        obs,
        seed=seed,
        num_steps=config.num_steps,
        on_steps=on_steps,
        max_policy_lag=lag,
        journal=journal,
    )
    return OnPolicyRounds(collector, learner, max_policy_lag=lag)
