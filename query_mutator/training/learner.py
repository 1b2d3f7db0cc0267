"""The learner of a run: new or restored from a checkpoint, and the teacher that it may imitate first."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Protocol, runtime_checkable

from query_mutator.env.task import Task, operator_names
from query_mutator.errors import CheckpointError, UsageError
from query_mutator.learners.hindsight import Relabel, relabel
from query_mutator.learners.learner import InferencePolicy, Learner
from query_mutator.learners.named import LEARNERS
from query_mutator.learners.plan import Plan, plan_policy
from query_mutator.registry import check_known
from query_mutator.session.checkpoint import Checkpoint, read_checkpoint
from query_mutator.session.loading import load_policy
from query_mutator.training.config import SEARCH, TrainConfig
from query_mutator.types import ASK

__all__ = ["make_learner", "read_teacher", "teach"]


def make_learner(config: TrainConfig, task: Task, checkpoint: Checkpoint | None) -> Learner:
    """Return a new learner, or the restored one of a checkpoint; CheckpointError for that of another algorithm."""
    observer = task.observer
    make = LEARNERS.get(config.algo).make
    learner = make(observer.size, len(task.actions), config, mask_columns=observer.slices["closed"])
    if config.teacher not in (None, SEARCH):
        teach(learner, read_teacher(config, task.actions), task, config)
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
class ImitationLearner(Protocol):
    """A learner that can imitate another policy, or start from it."""

    def learn_from(self, teacher: InferencePolicy, *, rollouts: int, relabel: Relabel | None) -> None:
        """Have `teacher` choose the actions of the first `rollouts`, and learn from it."""


def teach(learner: Learner, teacher: Plan | Checkpoint, task: Task, config: TrainConfig) -> None:
    """Have a teacher take the steps of the first rollouts of a learner, which imitates those that had an effect."""
    assert isinstance(learner, ImitationLearner)
    policy = plan_policy(teacher, task) if isinstance(teacher, Plan) else load_policy(teacher)
    in_hindsight = partial(
        relabel, observer=task.observer, num_operators=len(task.operators), max_steps=task.rules.max_episode_steps
    )
    learner.learn_from(policy, rollouts=config.teacher_rollouts, relabel=in_hindsight)


def read_teacher(config: TrainConfig, actions: Sequence[str]) -> Plan | Checkpoint:
    """Return the plan (a,b,c) or checkpoint that `--teacher` names; UsageError unless it has these actions."""
    spec = str(config.teacher)
    if "/" in spec or spec.endswith(".pt") or Path(spec).exists():
        checkpoint = read_checkpoint(spec)
        checkpoint.check_actions(actions)
        if LEARNERS.get(config.algo).only_plans and checkpoint.algo != "plan":
            raise UsageError(f"--teacher {spec}: --algo {config.algo} starts from a plan; name its steps, or search")
        return checkpoint
    steps = [name.strip() for name in spec.split(",") if name.strip()]
    for name in steps:
        check_known("step of --teacher", name, [*operator_names(actions), ASK])
    if ASK not in actions:
        raise UsageError(f"--teacher {spec} is a plan, which asks at its end; add --ask form")
    try:
        return Plan(steps=tuple(steps))
    except ValueError as error:
        raise UsageError(f"--teacher: {error}") from None
