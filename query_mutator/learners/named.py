"""Learners by name.

PPO and IQN are imported when they are built, because they load torch; a policy for inference loads none. Add your own
by subclassing `BaseLearner`:

    @LEARNERS.register("mine")
    class Mine(BaseLearner): ...
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ppo.frozen import FrozenPolicy, InferencePolicy
from query_mutator.learners.direct import DirectMethod, FrozenValues
from query_mutator.learners.iqn.frozen import FrozenQuantiles
from query_mutator.learners.learner import Learner, LearnerSpec
from query_mutator.learners.plan import PlanPolicy
from query_mutator.registry import Registry

LEARNERS: Registry[type[LearnerSpec]] = Registry("learner", group="query_mutator.learners")


@LEARNERS.register("ppo")
class PPOSpec(LearnerSpec):
    """PPO, which the top-level `ppo` implements."""

    on_policy = True
    deterministic = True

    @classmethod
    def make(cls, obs_dim: int, num_actions: int, config: Any, *, mask_columns: slice) -> Learner:
        """Return a new learner."""
        from query_mutator.learners.ppo import PPOLearner

        return PPOLearner(obs_dim, num_actions, config, mask_columns=mask_columns)

    @classmethod
    def load_policy(cls, state: Mapping[str, Any], flags: Mapping[str, Any]) -> InferencePolicy:
        """Return the policy of saved weights for inference."""
        return FrozenPolicy(state, deterministic=bool(flags.get("deterministic")))

    @staticmethod
    def planned_updates(config: Any) -> int:
        """Return the gradient steps of a whole run."""
        return int(config.num_updates * config.ppo_epoch * config.num_mini_batch)


@LEARNERS.register("iqn")
class IQNSpec(LearnerSpec):
    """Implicit quantile networks."""

    @classmethod
    def make(cls, obs_dim: int, num_actions: int, config: Any, *, mask_columns: slice) -> Learner:
        """Return a new learner."""
        from query_mutator.learners.iqn.learner import IQN

        return IQN(obs_dim, num_actions, config, mask_columns=mask_columns)

    @classmethod
    def load_policy(cls, state: Mapping[str, Any], flags: Mapping[str, Any]) -> InferencePolicy:
        """Return the policy of saved weights for inference."""
        return FrozenQuantiles(state, num_quantiles=flags["num_eval_quantiles"])

    @staticmethod
    def planned_updates(config: Any) -> int:
        """Return the gradient steps of a whole run."""
        return int(config.replay_ratio * config.total_steps / config.train_batch_size)


@LEARNERS.register("direct")
class DirectSpec(LearnerSpec):
    """Fitted Q iteration with boosted trees."""

    deterministic = True

    @classmethod
    def make(cls, obs_dim: int, num_actions: int, config: Any, *, mask_columns: slice) -> Learner:
        """Return a new learner."""
        return DirectMethod(obs_dim, num_actions, config, mask_columns=mask_columns)

    @classmethod
    def load_policy(cls, state: Mapping[str, Any], flags: Mapping[str, Any]) -> InferencePolicy:
        """Return the policy of saved trees for inference."""
        return FrozenValues(state)


@LEARNERS.register("plan")
class PlanSpec(LearnerSpec):
    """A fixed order of operators, which a search finds."""

    made_by = "qm plan"

    @classmethod
    def load_policy(cls, state: Mapping[str, Any], flags: Mapping[str, Any]) -> InferencePolicy:
        """Return the plan for inference."""
        return PlanPolicy(state)
