"""Learners by name.

PPO and IQN load torch when they are made; a policy for inference loads none. Add your own by subclassing `BaseLearner`:

    @LEARNERS.register("mine")
    class Mine(BaseLearner): ...
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ppo.frozen import InferencePolicy
from query_mutator.learners.direct import DirectMethod
from query_mutator.learners.iqn.frozen import FrozenQuantiles
from query_mutator.learners.learner import Learner
from query_mutator.learners.plan import ALGO, Plan, PlanPolicy
from query_mutator.learners.ppo import PPOLearner
from query_mutator.registry import Registry

LEARNERS: Registry[type[Learner]] = Registry("learner", group="query_mutator.learners")
LEARNERS.add("ppo", PPOLearner)


@LEARNERS.register("iqn")
class IQNSpec(Learner):
    """Implicit quantile networks, whose module loads torch."""

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


LEARNERS.add("direct", DirectMethod)


@LEARNERS.register(ALGO)
class PlanSpec(Learner):
    """A fixed order of operators, which a search finds."""

    made_by = "qm plan"

    @classmethod
    def load_policy(cls, state: Mapping[str, Any], flags: Mapping[str, Any]) -> PlanPolicy:  # type: ignore[override]  # no InferencePolicy: it reads no observation
        """Return the plan, which is in the flags."""
        return PlanPolicy(flags["plan"] or Plan())
