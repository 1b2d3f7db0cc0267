"""From a run folder or a policy file to a task against running models, with the dataset gone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from query_mutator.data import Split
from query_mutator.env.task import Task, operator_names
from query_mutator.errors import CheckpointError
from query_mutator.learners.learner import InferencePolicy
from query_mutator.learners.named import LEARNERS
from query_mutator.llm.backends import ADDRESS_FLAGS, BACKENDS, backend_for
from query_mutator.rewards import NoReward
from query_mutator.session.background import background_of, check_encoder, warn_of_operators
from query_mutator.session.checkpoint import Checkpoint
from query_mutator.session.dataset import split_dataset
from query_mutator.session.models import OpenModels, ResolvedModels
from query_mutator.session.policy_file import SavedPolicy
from query_mutator.session.task import make_task
from query_mutator.types import Question

__all__ = ["acting_settings", "acting_task", "load_policy", "training_split", "with_background"]


def load_policy(checkpoint: Checkpoint) -> InferencePolicy:
    """Return the policy of a checkpoint for inference; CheckpointError for weights of another kind."""
    flags = {**checkpoint.flags, "deterministic": checkpoint.system.deterministic}
    try:
        return LEARNERS.get(checkpoint.algo).load_policy(checkpoint.learner["policy"], flags)
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from error


def acting_settings(settings: ResolvedModels, given: Mapping[str, Any]) -> ResolvedModels:
    """Return the training's settings with those given in place of them, without simulated latency."""
    settings = replace(settings, latency_ms=0.0, latency_sigma=0.0, running_speed=0.0)
    given = dict(given)
    nowhere: dict[str, Any] = {**dict.fromkeys(ADDRESS_FLAGS), "file_digests": ()}
    if given.get("backend", settings.backend) != settings.backend:  # addresses and models do not fit another backend
        settings = replace(settings, **nowhere, target_model=None, mutator_model=None)
    for flag in ADDRESS_FLAGS:
        if flag in given:
            settings = replace(settings, **nowhere)
            given.setdefault("backend", backend_for(flag, backend=settings.backend))
            if BACKENDS.get(given["backend"]).runs_files:
                settings = replace(settings, target_model=None, mutator_model=None)
    return replace(settings, **given)


def training_split(saved: SavedPolicy) -> Split:
    """Return the questions of the training from its dataset; DatasetError when it is gone.

    A file is read from where it was in training, else from the same relative path.
    """
    settings, background = saved.checkpoint.task, saved.background
    moved = background.dataset if background is not None else None
    if moved is not None and Path(moved).is_file():
        settings = replace(settings, dataset=moved)
    return split_dataset(settings)


def acting_task(saved: SavedPolicy, models: OpenModels, *, train: Sequence[Question] | None = None) -> Task:
    """Return the task of a policy on the training questions, among which are the ones to merge in.

    With `train`, the questions with gold, answers are scored as in training; without, they are not.
    """
    background, reward = saved.background, NoReward() if train is None else None
    vocabulary = None
    if background is not None:
        check_encoder(background, models.encoder, path=saved.checkpoint.path)
        models.encoder.put([question.text for question in background.train], background.train_vectors)
        vocabulary = background.vocabulary
    if train is None:
        known = background.train if background is not None else training_split(saved).train
        train = [Question(id=question.id, text=question.text) for question in known]
    checkpoint = saved.checkpoint
    settings = replace(checkpoint.task, operators=",".join(operator_names(checkpoint.actions)))
    task = make_task(models, settings, train, projection=checkpoint.projection, vocabulary=vocabulary, reward=reward)
    checkpoint.check_actions(task.actions)
    if background is not None:
        warn_of_operators(background, task.operators)
    return task


def with_background(saved: SavedPolicy, models: OpenModels) -> SavedPolicy:
    """Return a policy with its background; that of a run without one comes from its dataset."""
    if saved.background is not None:
        return saved
    split = training_split(saved)
    task = acting_task(saved, models, train=split.train)
    return replace(saved, background=background_of(models, task, split, dataset=saved.checkpoint.task.dataset))
