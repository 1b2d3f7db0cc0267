"""What a resumed run continues from: models, counts of calls, journal, environments, what its callbacks see.

Each function takes the checkpoint, None for a new run.
"""

from __future__ import annotations

from query_mutator.bounds import group_of
from query_mutator.files.run_dir import RunDir
from query_mutator.llm.stack import CallTotals, ClientStack
from query_mutator.session.checkpoint import Checkpoint, Progress
from query_mutator.session.journal import Journal, keep_embeddings
from query_mutator.session.models import OpenModels, ResolvedModels
from query_mutator.training.callbacks.base import RunView
from query_mutator.training.config import TrainConfig
from query_mutator.training.parts import RunParts
from query_mutator.training.workers import local_addresses
from query_mutator.types import FloatArray

__all__ = ["open_journal", "restore_counts", "restore_envs", "resumed_models", "resumed_view"]


def resumed_models(config: TrainConfig, checkpoint: Checkpoint | None) -> ResolvedModels:
    """Return the settings of the run's models; a resumed folder needs the files of models that it was started with."""
    digests = checkpoint.system.file_digests if checkpoint is not None and config.resumes_folder else ()
    return group_of(ResolvedModels, config, file_digests=digests, **local_addresses(config))


def restore_counts(calls: ClientStack, checkpoint: Checkpoint | None) -> None:
    """Count on from the calls that the run has made."""
    if checkpoint is not None:
        done = checkpoint.progress
        calls.counted.totals = CallTotals(calls=done.llm_calls, tokens=done.tokens, cut_replies=done.cut_replies)


def open_journal(models: OpenModels, run_dir: RunDir, checkpoint: Checkpoint | None) -> Journal:
    """Return the journal of calls."""
    since = checkpoint.progress.env_steps if checkpoint else 0
    journal = Journal(run_dir.journal_path, since=since, on_replay=models.calls.counted.add)
    keep_embeddings(models.encoder, journal)
    return journal


def restore_envs(parts: RunParts, checkpoint: Checkpoint | None) -> FloatArray | None:
    """Restore environments; return the observations [N, O], None for new episodes.

    A resumed run folder continues in the middle of its episodes; a run from a checkpoint file starts new ones.
    """
    if checkpoint is None:
        return None
    if checkpoint.envs is not None and parts.config.resumes_folder:
        return parts.envs.load_state_dict(checkpoint.envs)
    done = checkpoint.progress
    for env, steps, episodes in zip(parts.env_list, done.env_total_steps, done.env_episodes, strict=False):
        env.total_steps, env.total_episodes = steps, episodes
    return None


def resumed_view(parts: RunParts, checkpoint: Checkpoint | None) -> RunView:
    """Return the run as callbacks see it; the best success counts on while the validation questions are the same."""
    done = checkpoint.progress if checkpoint else Progress()
    has_same_fold = checkpoint is not None and checkpoint.task.validation_fold == parts.config.validation_fold
    return RunView(
        config=parts.config,
        folder=parts.run_dir.path,
        env_steps=done.env_steps,
        updates_done=parts.learner.updates_done,
        invalid_steps=done.invalid_steps,
        best_success=done.best_success if has_same_fold else 0.0,
    )
