"""Make the task of a run: its questions and the rules of an episode, against models that are open."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from query_mutator import forms as form_registry
from query_mutator import operators as operator_registry
from query_mutator.bounds import group_of
from query_mutator.cli.console import note
from query_mutator.confidence import ConfidenceModel
from query_mutator.encoder import english_words
from query_mutator.env.observation import Projection
from query_mutator.env.rules import EpisodeRules
from query_mutator.env.task import CallSettings, Task, build_task
from query_mutator.errors import UsageError
from query_mutator.forms import Form
from query_mutator.operators import Operator, PromptOperator, local_rewrite
from query_mutator.rewards import WeightedReward
from query_mutator.session.dataset import example_bank
from query_mutator.session.judging import make_judge, make_reward
from query_mutator.session.models import OpenModels, ResolvedModels
from query_mutator.settings.episode import Operators, TaskSettings
from query_mutator.types import Question

__all__ = ["make_task", "rewrites", "with_local_test"]

_WORD = re.compile(r"[a-z]+(?:'[a-z]+)*")


def rewrites(settings: Operators) -> tuple[tuple[Operator, ...], tuple[Form, ...]]:
    """Return the operators and forms of a policy's first actions; UsageError for a name that is both."""
    operators, forms = operator_registry.select(settings.operators), form_registry.select(settings.forms)
    if both := {one.name for one in operators} & {one.name for one in forms}:
        raise UsageError(f"{min(both)!r} names an operator and a form; leave it out of --operators or --forms")
    if not operators and not forms:
        raise UsageError("a policy needs something to choose; name operators or forms")
    return operators, forms


def make_task(
    models: OpenModels,
    settings: TaskSettings,
    questions: Sequence[Question],
    *,
    projection: Projection | None = None,
    reward: WeightedReward | None = None,
    bank: Sequence[Question] | None = None,
    confidence: ConfidenceModel | None = None,
    learns: bool = False,
) -> Task:
    """Return the task on training `questions` against open models.

    `reward` replaces that of the settings; `bank` has the examples that forms show, by default those of a bundled set
    or the training questions; `confidence` is what --answer learned submits by. A caller that `learns` it gets answers
    with their log probability; for others --answer learned without it is a UsageError.
    """
    if settings.answer == "learned" and confidence is None and not learns:
        raise UsageError("--answer learned submits by a P(right) that a training learns; choose another --answer")
    operators, forms = rewrites(settings)
    operators = _available(operators, models, is_default=not settings.operators)
    named, answering = models.settings.mutator_model, models.target_model
    is_resumed = isinstance(models.settings, ResolvedModels)
    if named not in (None, answering) and not is_resumed and all(local_rewrite(one) is not None for one in operators):
        raise UsageError(
            f"--mutator-model {named} would never be called: no model carries out {settings.operators or 'a rewrite'}; "
            "leave it out, or name other --operators, as spelling,neutral"
        )
    if settings.skip_unchanged:
        operators = tuple(map(with_local_test, operators))
    judge = make_judge(models.calls, settings, seed=settings.seed)
    names = {"target_model": models.target_model, "mutator_model": models.mutator_model}
    task = build_task(
        questions,
        calls=group_of(
            CallSettings,
            settings,
            logprobs=learns or (confidence is not None and confidence.reads_logprobs),
            **names,
        ),
        encoder=models.encoder,
        operators=operators,
        known_words=english_words(),
        embedding_dims=settings.embedding_dims,
        projection=projection,
        reward=reward or make_reward(settings, judge=judge),
        domain=settings.domain,
        rules=group_of(EpisodeRules, settings),
        forms=forms,
        bank=example_bank(settings.dataset) or bank,
        confidence=confidence,
    )
    recording = models.choice.recording
    return task if recording is None else replace(task, recorded=recording.find)


def _available(operators: Sequence[Operator], models: OpenModels, *, is_default: bool) -> tuple[Operator, ...]:
    """Return the operators without those that a recording has no rewrites of; UsageError if they were named."""
    if models.choice.recording is None:
        return tuple(operators)
    known = models.choice.recording.head.operators
    missing = [one.name for one in operators if local_rewrite(one) is None and one.name not in known]
    if not missing:
        return tuple(operators)
    if not is_default:
        raise UsageError(
            f"no rewrites by {', '.join(missing)} are recorded; leave them out of --operators, or ask the model, as "
            "with --gguf smollm2"
        )
    note(f"operators without recorded rewrites are left out: {', '.join(missing)}")
    return tuple(one for one in operators if one.name not in missing)


def with_local_test(operator: Operator) -> Operator:
    """Return `spelling` with a test that spares the call where every word is known; other operators as they are."""
    if isinstance(operator, PromptOperator) and operator.name == "spelling" and operator.test is None:
        return replace(operator, test=_has_unknown_word)
    return operator


@lru_cache(maxsize=16_384)
def _has_unknown_word(text: str) -> bool:
    known = english_words()
    return any(word not in known for word in _WORD.findall(text.lower().replace("’", "'")))
