"""Query Mutator's groups of settings as configs of verifiers, so that each setting is declared once."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any, get_origin, get_type_hints

import verifiers.v1 as vf
from pydantic import BeforeValidator, Field, create_model

from query_mutator.bounds import Group
from query_mutator.cli.flags import docs_of
from query_mutator.settings.episode import Operators
from query_mutator.settings.models import ModelSettings, Sampling
from query_mutator.settings.questions import Questions

__all__ = ["ModelsConfig", "QuestionsConfig"]


def _fields_of(*groups: type[Group]) -> dict[str, Any]:
    """Return the fields of groups as pydantic takes them: annotations with bounds, defaults, help."""
    found: dict[str, Any] = {}
    for group in groups:
        hints, docs = get_type_hints(group, include_extras=True), docs_of(group)
        for one in fields(group):
            hint: Any = hints[one.name]
            if get_origin(hint) is tuple:  # a flag with one value is a text
                hint = Annotated[hint, BeforeValidator(lambda given: (given,) if isinstance(given, str) else given)]
            found[one.name] = (hint, Field(one.default, description=docs.get(one.name)))
    return found


#: `--env.taskset.models.*`: target, mutator, server, retries, cache, limit on calls in flight.
ModelsConfig: type[vf.BaseConfig] = create_model("ModelsConfig", __base__=vf.BaseConfig, **_fields_of(ModelSettings))
#: `--env.taskset.*`: the set of questions, operators and forms, and how the target answers.
QuestionsConfig: type[vf.TasksetConfig] = create_model(
    "QuestionsConfig", __base__=vf.TasksetConfig, **_fields_of(Questions, Operators, Sampling)
)
