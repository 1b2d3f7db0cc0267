"""The models of `gymnasium.make`: opened once for equal settings, closed with their last environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from query_mutator.env.task import Task
from query_mutator.errors import KeywordError
from query_mutator.registry import nearest
from query_mutator.session.dataset import split_dataset
from query_mutator.session.models import OpenModels, open_models
from query_mutator.session.task import make_task
from query_mutator.settings.episode import TaskSettings
from query_mutator.settings.models import ModelSettings

__all__ = ["SharedModels"]

_running: dict[ModelSettings, tuple[OpenModels, int]] = {}  # with the number of users


class SharedModels:
    """Open models and the task on training questions that keywords name: fields of both their settings."""

    def __init__(self, keywords: Mapping[str, Any], *, others: tuple[str, ...]) -> None:
        """Open the models unless they are open; KeywordError for one that is not a field or in `others`."""
        self.settings, task_settings = _settings_of(keywords, others)
        self.models, users = _running.get(self.settings) or (
            open_models(self.settings, dataset=task_settings.dataset),
            0,
        )
        _running[self.settings] = (self.models, users + 1)
        try:
            self.task: Task = make_task(self.models, task_settings, split_dataset(task_settings).train)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the models if this was their last user; call it once."""
        models, users = _running.pop(self.settings)
        if users > 1:
            _running[self.settings] = (models, users - 1)
        else:
            models.close()


def _settings_of(keywords: Mapping[str, Any], others: tuple[str, ...]) -> tuple[ModelSettings, TaskSettings]:
    model_names = [field.name for field in fields(ModelSettings)]
    task_names = [field.name for field in fields(TaskSettings)]
    known = [*model_names, *task_names, *others]
    for name in keywords:
        if name not in known:
            near = nearest(name, known)
            hint = f", did you mean {near!r}?" if near else ""
            raise KeywordError(f"unexpected keyword argument {name!r}{hint}; known: {', '.join(known)}")
    given: dict[str, Any] = {"cache": "off", "seed": 0, "validation_fold": "none", **keywords}
    return (
        ModelSettings(**{name: value for name, value in given.items() if name in model_names}),
        TaskSettings(**{name: value for name, value in given.items() if name in task_names}),
    )
