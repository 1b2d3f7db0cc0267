"""From a run folder or a policy file to a task against running models, with the dataset gone."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from query_mutator.env.task import Task, rewrite_settings
from query_mutator.errors import CheckpointError
from query_mutator.learners import LEARNERS, PlanPolicy, Policy
from query_mutator.llm.backends import BACKENDS, backend_for
from query_mutator.plugins import use_plugins
from query_mutator.registry import check_known
from query_mutator.rewards import NoReward
from query_mutator.session.models import OpenModels, ResolvedModels
from query_mutator.session.policy_file import SHOWN_CHARS, SavedPolicy, check_named, read_policy
from query_mutator.session.task import make_task
from query_mutator.settings import ADDRESS_FLAGS, first_address
from query_mutator.types import Question

logger = logging.getLogger(__name__)


def load_saved(path: str | Path, plugins: Sequence[str] = (), *, best: bool = False) -> SavedPolicy:
    """Return the policy of a run folder or a `.qm` file, after loading `plugins`; `best`: what won in the verdict.

    CheckpointError for an unusable file; UsageError for a plugin of its training that is not given.
    """
    saved = read_policy(path, best=best)
    return replace(saved, plugins=use_plugins(saved.plugins, plugins, source=saved.path))


def load_policy(saved: SavedPolicy, task: Task | None = None) -> Policy:
    """Return the policy for inference; CheckpointError for weights of another kind, or another task."""
    flags = {**vars(saved.flags), "deterministic": saved.system.deterministic}
    try:
        policy: Policy = LEARNERS.get(saved.flags.algo).load_policy(saved.weights, flags)
        if isinstance(policy, PlanPolicy):
            for name in policy.plan.steps:
                check_known("action of the plan", name, saved.actions)
            return policy
        if getattr(policy, "num_actions", len(saved.actions)) != len(saved.actions):
            raise ValueError(f"its weights are not for {len(saved.actions)} actions")
        if task is not None:
            policy.act(np.zeros((1, task.observer.size), np.float32), (), greedy=True)
    except (ValueError, LookupError, TypeError) as error:
        raise CheckpointError(f"{saved.path}: {error}") from error
    return policy


def acting_settings(
    settings: ResolvedModels, given: Mapping[str, Any], *, saved: SavedPolicy | None = None
) -> ResolvedModels:
    """Return the settings of models with those given in place of them, without simulated latency.

    UsageError for a server or file of the training of `saved` in whose place none is given.
    """
    models = given.get("target_model") or ()
    given = {**first_address((models,) if isinstance(models, str) else models), **given}
    if saved is not None:
        check_named(saved.trained_with, given, source=saved.path)
    settings = replace(settings, latency_ms=0.0, latency_sigma=0.0, running_speed=0.0)
    nowhere: dict[str, Any] = {**dict.fromkeys(ADDRESS_FLAGS), "file_digests": ()}
    if given.get("backend", settings.backend) != settings.backend:  # addresses and models do not fit another backend
        settings = replace(settings, **nowhere, target_model=(), mutator_model=None)
    for flag in ADDRESS_FLAGS:
        if flag in given:
            settings = replace(settings, **nowhere)
            given.setdefault("backend", backend_for(flag, backend=settings.backend))
            if BACKENDS.get(given["backend"]).runs_files:
                settings = replace(settings, target_model=(), mutator_model=None)
    return replace(settings, **given)


def acting_task(saved: SavedPolicy, models: OpenModels, *, train: Sequence[Question] | None = None) -> Task:
    """Return the task of a policy on the training questions, among which are the ones to merge in.

    With `train`, the questions with gold, answers are scored as in training; without, they are not.
    """
    reward, bank = NoReward() if train is None else None, None
    saved.check_encoder(models.encoder)
    models.encoder.put([question.text for question in saved.train], saved.train_vectors)
    if train is None:
        train, bank = [Question(id=one.id, text=one.text) for one in saved.train], saved.train
    settings = replace(saved.task, **rewrite_settings(saved.actions, models.targets))
    task = make_task(
        models,
        settings,
        train,
        projection=saved.projection,
        reward=reward,
        bank=bank,
        confidence=saved.confidence,
        learns=reward is None and len(models.targets) > 1,  # a baseline reads log probabilities
    )
    digests = models.calls.servers[0].file_digests()
    if saved.system.first_model == models.target_model and (saved.system.file_digests or digests) != digests:
        logger.warning("%s is another file than in training; results may differ", models.target_model)
    gains = saved.gains
    if gains is not None and task.prices and all(price.is_per_call for price in task.prices.values()):
        paid = [task.price(task.form_named(arm).model) for arm in gains.arms]
        gains = replace(gains, prices=np.array(paid))  # those given now
    task = replace(task, gains=gains)
    if task.actions != saved.actions:
        raise CheckpointError(f"{saved.path} was made for the actions {', '.join(saved.actions)[:SHOWN_CHARS]}")
    return task
