"""Learners by name: build one for a run, or load the policy of a checkpoint for inference.

Built-in learners are imported when they are built, because they load torch. Add your own by subclassing `BaseLearner`:

    @LEARNERS.register("mine")
    class Mine(BaseLearner): ...
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

from query_mutator.errors import CheckpointError
from query_mutator.registry import Registry
from query_mutator.training.learner import BaseLearner, InferencePolicy, Learner, LearnerSpec

if TYPE_CHECKING:
    from query_mutator.env.task import Task
    from query_mutator.training.checkpoint import Checkpoint
    from query_mutator.training.config import TrainConfig

__all__ = ["LEARNERS", "load_policy", "make_learner", "settings_of"]

S = TypeVar("S")

LEARNERS: Registry[LearnerSpec | type[BaseLearner]] = Registry("learner", group="query_mutator.learners")


def settings_of(cls: type[S], flags: object, **others: Any) -> S:
    """Return the settings record `cls`, its fields taken from the flags of the same names, then from `others`."""
    names = [field.name for field in fields(cls) if field.name not in others]  # type: ignore[arg-type]
    return cls(**{name: getattr(flags, name) for name in names} | others)


def _make_ppo(obs_dim: int, num_actions: int, config: TrainConfig, *, mask_columns: slice) -> Learner:
    from query_mutator.training.ppo_learner import PPOLearner

    return PPOLearner(obs_dim, num_actions, config, mask_columns=mask_columns, max_policy_lag=config.max_policy_lag)


def _load_ppo(state: Mapping[str, Any], flags: Mapping[str, Any]) -> InferencePolicy:
    from ppo.policy import Policy

    return Policy.from_state_dict(state).frozen(deterministic=bool(flags.get("deterministic")))


def _make_iqn(obs_dim: int, num_actions: int, config: TrainConfig, *, mask_columns: slice) -> Learner:
    from query_mutator.iqn.config import IQNConfig
    from query_mutator.iqn.learner import IQN

    return IQN(obs_dim, num_actions, settings_of(IQNConfig, config), mask_columns=mask_columns)


def _load_iqn(state: Mapping[str, Any], flags: Mapping[str, Any]) -> InferencePolicy:
    from query_mutator.iqn.network import QuantileNetwork

    return QuantileNetwork.from_state_dict(state).frozen(num_quantiles=flags["num_eval_quantiles"])


def _make_bandit(obs_dim: int, num_actions: int, config: TrainConfig, *, mask_columns: slice) -> Learner:
    from query_mutator.bandit import Bandit, BanditConfig

    return Bandit(obs_dim, num_actions, settings_of(BanditConfig, config), mask_columns=mask_columns)


def _load_bandit(state: Mapping[str, Any], flags: Mapping[str, Any]) -> InferencePolicy:
    from query_mutator.bandit import FrozenBandit

    return FrozenBandit(state)


def _make_plan(obs_dim: int, num_actions: int, config: TrainConfig, *, mask_columns: slice) -> Learner:
    raise NotImplementedError("a plan is found by a search, not trained")


def _load_plan(state: Mapping[str, Any], flags: Mapping[str, Any]) -> InferencePolicy:
    from query_mutator.training.plans import PlanPolicy

    return PlanPolicy(state)


LEARNERS.add(
    "ppo",
    LearnerSpec(
        make=_make_ppo,
        load_policy=_load_ppo,
        planned_updates=lambda config: config.num_updates * config.ppo_epoch * config.num_mini_batch,
        on_policy=True,
        deterministic=True,
    ),
)
LEARNERS.add(
    "iqn",
    LearnerSpec(
        make=_make_iqn,
        load_policy=_load_iqn,
        planned_updates=lambda config: int(config.replay_ratio * config.total_steps / config.train_batch_size),
    ),
)
LEARNERS.add("bandit", LearnerSpec(make=_make_bandit, load_policy=_load_bandit))
LEARNERS.add("plan", LearnerSpec(make=_make_plan, load_policy=_load_plan, made_by="qm plan"))


def make_learner(config: TrainConfig, task: Task, checkpoint: Checkpoint | None) -> Learner:
    """Return a new learner, or the restored one of a checkpoint; CheckpointError for that of another algorithm."""
    observer = task.observer
    make = LEARNERS.get(config.algo).make
    learner = make(observer.size, len(task.actions), config, mask_columns=observer.slices["closed"])
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


def load_policy(checkpoint: Checkpoint) -> InferencePolicy:
    """Return the policy of a checkpoint for inference; CheckpointError for weights of another kind."""
    flags = {**checkpoint.flags, "deterministic": checkpoint.system.deterministic}
    try:
        return LEARNERS.get(checkpoint.algo).load_policy(checkpoint.learner["policy"], flags)
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from error
