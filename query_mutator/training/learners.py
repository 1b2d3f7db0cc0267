"""Which learner an algorithm's name stands for, and how its saved policy is had back for acting."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from query_mutator.errors import CheckpointError
from query_mutator.training.config import settings_of

if TYPE_CHECKING:
    from typing import TypeAlias

    from ppo.algorithm import PPO
    from ppo.policy import Acting
    from query_mutator.bandit import Bandit
    from query_mutator.env.task import Task
    from query_mutator.iqn.learner import IQN
    from query_mutator.training.checkpoint import Checkpoint
    from query_mutator.training.config import TrainConfig

    AnyLearner: TypeAlias = PPO | IQN | Bandit


def make_learner(config: TrainConfig, task: Task, checkpoint: Checkpoint | None) -> AnyLearner:
    """Return a new learner, or the one of the checkpoint; one of another algorithm is a CheckpointError."""
    learner = _new_learner(config, task)
    if checkpoint is None:
        return learner
    if checkpoint.algo != config.algo:
        raise CheckpointError(
            f"{checkpoint.path} was made with --algo {checkpoint.algo}; leave out --algo {config.algo}"
        )
    try:
        learner.load_state_dict(checkpoint.learner)
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from error
    return learner


def _new_learner(config: TrainConfig, task: Task) -> AnyLearner:
    size, closed = (task.observer.size, len(task.actions)), task.observer.slices["closed"]
    if config.algo == "ppo":
        from ppo.algorithm import PPO

        return PPO(*size, config, closed=closed)
    if config.algo == "iqn":
        from query_mutator.iqn.config import IQNConfig
        from query_mutator.iqn.learner import IQN

        return IQN(*size, settings_of(IQNConfig, config), closed=closed)
    from query_mutator.bandit import Bandit, BanditConfig

    return Bandit(*size, settings_of(BanditConfig, config), closed=closed)


def frozen_policy(checkpoint: Checkpoint) -> Acting:
    """Return the policy of a checkpoint, ready to act; weights that are none are a CheckpointError."""
    state: Mapping[str, Any] = checkpoint.learner["policy"]
    try:
        if checkpoint.algo == "iqn":
            from query_mutator.iqn.network import QuantileNetwork

            return QuantileNetwork.from_state_dict(state).frozen(num_quantiles=checkpoint.flags["num_eval_quantiles"])
        if checkpoint.algo == "bandit":
            from query_mutator.bandit import FrozenBandit

            return FrozenBandit(state)
        from ppo.policy import Policy

        return Policy.from_state_dict(state).frozen(deterministic=bool(checkpoint.system.deterministic))
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from error
