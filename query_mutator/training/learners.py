"""Learners by name: build one for a run, or load the policy of a checkpoint for inference.

PPO and IQN are imported when they are built, because they load torch; a policy for inference loads none. Add your own
by subclassing `BaseLearner`:

    @LEARNERS.register("mine")
    class Mine(BaseLearner): ...
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from ppo.frozen import FrozenPolicy
from query_mutator.bandit import Bandit, BanditConfig, FrozenBandit
from query_mutator.env.task import operator_names
from query_mutator.errors import CheckpointError, UsageError
from query_mutator.iqn.frozen import FrozenQuantiles
from query_mutator.registry import Registry, check_known
from query_mutator.training.hindsight import Relabel, relabel
from query_mutator.training.learner import BaseLearner, InferencePolicy, Learner, LearnerSpec
from query_mutator.training.plans import Plan, PlanPolicy, plan_policy
from query_mutator.types import ASK

if TYPE_CHECKING:
    from query_mutator.env.task import Task
    from query_mutator.training.checkpoint import Checkpoint
    from query_mutator.training.config import TrainConfig

__all__ = ["LEARNERS", "SEARCH", "load_policy", "make_learner", "read_teacher", "settings_of", "teach"]

SEARCH = "search"  # for --teacher: the plan that is found on the training questions

S = TypeVar("S")

LEARNERS: Registry[LearnerSpec | type[BaseLearner]] = Registry("learner", group="query_mutator.learners")


def settings_of(cls: type[S], flags: object, **others: Any) -> S:
    """Return the settings record `cls`, its fields taken from the flags of the same names, then from `others`.

    Fields marked as recorded are not flags: a run finds their values.
    """
    of_flags = [field for field in fields(cls) if "recorded" not in field.metadata]  # type: ignore[arg-type]
    names = [field.name for field in of_flags if field.name not in others]
    return cls(**{name: getattr(flags, name) for name in names} | others)


def _make_ppo(obs_dim: int, num_actions: int, config: TrainConfig, *, mask_columns: slice) -> Learner:
    from query_mutator.training.ppo_learner import PPOLearner

    return PPOLearner(obs_dim, num_actions, config, mask_columns=mask_columns, max_policy_lag=config.max_policy_lag)


def _load_ppo(state: Mapping[str, Any], flags: Mapping[str, Any]) -> InferencePolicy:
    return FrozenPolicy(state, deterministic=bool(flags.get("deterministic")))


def _make_iqn(obs_dim: int, num_actions: int, config: TrainConfig, *, mask_columns: slice) -> Learner:
    from query_mutator.iqn.config import IQNConfig
    from query_mutator.iqn.learner import IQN

    return IQN(obs_dim, num_actions, settings_of(IQNConfig, config), mask_columns=mask_columns)


def _load_iqn(state: Mapping[str, Any], flags: Mapping[str, Any]) -> InferencePolicy:
    return FrozenQuantiles(state, num_quantiles=flags["num_eval_quantiles"])


def _make_bandit(obs_dim: int, num_actions: int, config: TrainConfig, *, mask_columns: slice) -> Learner:
    return Bandit(obs_dim, num_actions, settings_of(BanditConfig, config), mask_columns=mask_columns)


def _load_bandit(state: Mapping[str, Any], flags: Mapping[str, Any]) -> InferencePolicy:
    return FrozenBandit(state)


def _make_plan(obs_dim: int, num_actions: int, config: TrainConfig, *, mask_columns: slice) -> Learner:
    raise NotImplementedError("a plan is found by a search, not trained")


def _load_plan(state: Mapping[str, Any], flags: Mapping[str, Any]) -> InferencePolicy:
    return PlanPolicy(state)


LEARNERS.add(
    "ppo",
    LearnerSpec(
        make=_make_ppo,
        load_policy=_load_ppo,
        planned_updates=lambda config: config.num_updates * config.ppo_epoch * config.num_mini_batch,
        on_policy=True,
        deterministic=True,
        imitates=True,
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
    if config.teacher not in (None, SEARCH):
        teach(learner, read_teacher(config.teacher, task.actions), task, config)
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


@runtime_checkable
class Pupil(Protocol):
    """A learner that can imitate another policy."""

    def learn_from(self, teacher: InferencePolicy, *, rollouts: int, relabel: Relabel | None) -> None:
        """Have `teacher` choose the actions of the first `rollouts`, and imitate it after `relabel`."""


def teach(learner: Learner, teacher: Plan | Checkpoint, task: Task, config: TrainConfig) -> None:
    """Have a teacher take the steps of the first rollouts of a learner, which imitates those that had an effect."""
    assert isinstance(learner, Pupil)
    policy = plan_policy(teacher, task) if isinstance(teacher, Plan) else load_policy(teacher)
    in_hindsight = partial(
        relabel, observer=task.observer, num_operators=len(task.operators), max_steps=task.max_episode_steps
    )
    learner.learn_from(policy, rollouts=config.teacher_rollouts, relabel=in_hindsight)


def read_teacher(spec: str, actions: Sequence[str]) -> Plan | Checkpoint:
    """Return the plan (a,b,c) or checkpoint that `--teacher` names; UsageError unless it has these actions."""
    if "/" in spec or spec.endswith(".pt") or Path(spec).exists():
        from query_mutator.training.checkpoint import read_checkpoint

        checkpoint = read_checkpoint(spec)
        checkpoint.check_actions(actions)
        return checkpoint
    steps = [name.strip() for name in spec.split(",") if name.strip()]
    if ASK not in actions:
        raise UsageError(f"--teacher {spec} is a plan, which asks at its end; add --ask policy")
    for name in steps:
        check_known("step of --teacher", name, [*operator_names(actions), ASK])
    try:
        return Plan(steps=tuple(steps))
    except ValueError as error:
        raise UsageError(f"--teacher: {error}") from None


def load_policy(checkpoint: Checkpoint) -> InferencePolicy:
    """Return the policy of a checkpoint for inference; CheckpointError for weights of another kind."""
    flags = {**checkpoint.flags, "deterministic": checkpoint.system.deterministic}
    try:
        return LEARNERS.get(checkpoint.algo).load_policy(checkpoint.learner["policy"], flags)
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from error
