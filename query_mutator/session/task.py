"""Make the task of a run: its questions and the rules of an episode, against models that are open."""

from __future__ import annotations

from collections.abc import Sequence

from query_mutator import forms as form_registry
from query_mutator import operators as operator_registry
from query_mutator.bounds import group_of
from query_mutator.confidence import ConfidenceModel
from query_mutator.encoder import english_words
from query_mutator.env.observation import Projection
from query_mutator.env.rules import EpisodeRules
from query_mutator.env.task import CallSettings, Task, build_task
from query_mutator.errors import UsageError
from query_mutator.forms import Form
from query_mutator.operators import Operator, local_rewrite
from query_mutator.rewards import WeightedReward
from query_mutator.session.dataset import example_bank
from query_mutator.session.judging import make_judge, make_reward
from query_mutator.session.models import OpenModels
from query_mutator.settings.episode import Operators, TaskSettings
from query_mutator.types import Question

__all__ = ["make_task", "rewrites"]


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
    vocabulary: frozenset[str] | None = None,
    reward: WeightedReward | None = None,
    bank: Sequence[Question] | None = None,
    confidence: ConfidenceModel | None = None,
    learns: bool = False,
) -> Task:
    """Return the task on training `questions` against open models, whose mutator knows all operators.

    `vocabulary` is the subject's, by default that of the models that answer; `reward` replaces that of the settings;
    `bank` has the examples that forms show, by default those of a bundled set or the training questions; `confidence`
    is what --answer learned submits by. A caller that `learns` it gets answers with their log probability; for others
    --answer learned without it is a UsageError.
    """
    if settings.answer == "learned" and confidence is None and not learns:
        raise UsageError("--answer learned submits by a P(right) that a training learns; choose another --answer")
    vocabulary = models.vocabulary if vocabulary is None else vocabulary
    operators, forms = rewrites(settings)
    asked = [operator.name for operator in operators if local_rewrite(operator) is None]
    models.require_operators(asked)
    if settings.skip_unchanged:
        operators = models.with_local_tests(operators, vocabulary)
    judge = make_judge(models.calls, settings, seed=settings.seed)
    names = {"target_model": models.target_model, "mutator_model": models.mutator_model}
    return build_task(
        questions,
        calls=group_of(
            CallSettings,
            settings,
            logprobs=learns or (confidence is not None and confidence.reads_logprobs),
            by_rules=models.by_rules,
            **names,
        ),
        encoder=models.encoder,
        operators=operators,
        known_words=english_words() | vocabulary,
        embedding_dims=settings.embedding_dims,
        projection=projection,
        reward=reward or make_reward(settings, judge=judge),
        domain=settings.domain,
        rules=group_of(EpisodeRules, settings),
        forms=forms,
        bank=example_bank(settings.dataset) or bank,
        confidence=confidence,
    )
