"""The learner of a run: new or restored from a checkpoint."""

from __future__ import annotations

from query_mutator.env.task import Task
from query_mutator.errors import CheckpointError
from query_mutator.learners.learner import Learner
from query_mutator.learners.named import LEARNERS
from query_mutator.session.checkpoint import Checkpoint
from query_mutator.training.config import TrainConfig

__all__ = ["make_learner"]


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
