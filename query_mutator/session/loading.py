"""From a run folder or a policy file to a task against running models, with the dataset gone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from ppo.frozen import InferencePolicy
from query_mutator.data import Split
from query_mutator.env.task import Task, rewrite_settings
from query_mutator.errors import CheckpointError
from query_mutator.learners.named import LEARNERS
from query_mutator.llm.backends import BACKENDS, backend_for
from query_mutator.plugins import load_plugins, replaced, warn_of_changes
from query_mutator.rewards import NoReward
from query_mutator.session.checkpoint import Checkpoint
from query_mutator.session.models import OpenModels, ResolvedModels
from query_mutator.session.policy_file import SavedPolicy, background_of, check_encoder, read_policy, warn_of_rewrites
from query_mutator.session.task import make_task, split_dataset
from query_mutator.session.trust import check_plugins, check_reach, unnamed
from query_mutator.settings.models import ADDRESS_FLAGS
from query_mutator.types import Question


def load_saved(path: str | Path, plugins: Sequence[str] = ()) -> SavedPolicy:
    """Return the policy of a run folder, a `.pt` or a `.qm` file, after loading `plugins` and those of its training.

    Plugins replace those of the same file name. CheckpointError for an unusable file; UnnamedError for a plugin that is
    neither given nor one of a run of this user.
    """
    saved = read_policy(path)
    recorded = replaced(saved.checkpoint.plugins, plugins)
    check_plugins(recorded, source=saved.checkpoint.path, named=plugins)
    load_plugins([*plugins, *recorded])
    warn_of_changes(recorded)
    return replace(saved, checkpoint=replace(saved.checkpoint, plugins=recorded))


def load_policy(checkpoint: Checkpoint, task: Task | None = None) -> InferencePolicy:
    """Return the policy of a checkpoint for inference; CheckpointError for weights of another kind, or another task."""
    flags = {**checkpoint.flags, "deterministic": checkpoint.system.deterministic}
    try:
        policy = LEARNERS.get(checkpoint.algo).load_policy(checkpoint.learner["policy"], flags)
        if getattr(policy, "num_actions", len(checkpoint.actions)) != len(checkpoint.actions):
            raise ValueError(f"its weights are not for {len(checkpoint.actions)} actions")
        if task is not None:
            policy.act(np.zeros((1, task.observer.size), np.float32), (), greedy=True)
    except (ValueError, LookupError, TypeError) as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from error
    return policy


def acting_settings(settings: ResolvedModels, given: Mapping[str, Any], *, source: object) -> ResolvedModels:
    """Return the training's settings with those given in place of them, without simulated latency.

    UnnamedError for a stored setting of `source` that reaches out and that nobody named.
    """
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
    settings = replace(settings, **given)
    check_reach(asdict(settings), source=source, named=given)
    return settings


def training_split(saved: SavedPolicy, *, named: str | None = None) -> Split:
    """Return the questions of the training from its dataset; DatasetError when it is gone.

    A file is read from where it was in training, else from the same relative path. UnnamedError for one outside the
    current folder that is neither `named` nor that of a run of this user.
    """
    settings, background = saved.checkpoint.task, saved.background
    moved = background.dataset if background is not None else None
    given = {"dataset": [named, str(Path(named).resolve())] if named else []}
    if moved is not None and not unnamed({"dataset": moved}, given) and Path(moved).is_file():
        settings = replace(settings, dataset=moved)
    check_reach({"dataset": settings.dataset}, source=saved.checkpoint.path, named=given)
    return split_dataset(settings)


def acting_task(saved: SavedPolicy, models: OpenModels, *, train: Sequence[Question] | None = None) -> Task:
    """Return the task of a policy on the training questions, among which are the ones to merge in.

    With `train`, the questions with gold, answers are scored as in training; without, they are not.
    """
    background, reward = saved.background, NoReward() if train is None else None
    bank = None
    if background is not None:
        check_encoder(background, models.encoder, path=saved.checkpoint.path)
        models.encoder.put([question.text for question in background.train], background.train_vectors)
    if train is None:
        known = background.train if background is not None else training_split(saved).train
        train, bank = [Question(id=question.id, text=question.text) for question in known], known
    checkpoint = saved.checkpoint
    settings = replace(checkpoint.task, **rewrite_settings(checkpoint.actions, checkpoint.task.forms))
    task = make_task(
        models,
        settings,
        train,
        projection=checkpoint.projection,
        reward=reward,
        bank=bank,
        confidence=checkpoint.confidence_model(),
    )
    checkpoint.check_actions(task.actions)
    if background is not None:
        warn_of_rewrites(background, (*task.operators, *task.forms))
    return task


def with_background(saved: SavedPolicy, models: OpenModels) -> SavedPolicy:
    """Return a policy with its background; that of a run without one comes from its dataset."""
    if saved.background is not None:
        return saved
    split = training_split(saved)
    task = acting_task(saved, models, train=split.train)
    dataset = saved.checkpoint.task.dataset
    return replace(saved, background=background_of(task, split, dataset=dataset))
