"""Make the task of a run: its questions and the rules of an episode, against models that are open."""

from __future__ import annotations

from collections.abc import Sequence

from query_mutator import operators as operator_registry
from query_mutator.bounds import group_of
from query_mutator.encoder import english_words
from query_mutator.env.observation import Projection
from query_mutator.env.rules import EpisodeRules
from query_mutator.env.task import CallSettings, Task, build_task
from query_mutator.operators import ROUND_TRIP, local_rewrite
from query_mutator.rewards import WeightedReward
from query_mutator.session.judging import make_judge, make_reward
from query_mutator.session.models import OpenModels
from query_mutator.settings.episode import TaskSettings
from query_mutator.types import Question

__all__ = ["make_task"]


def make_task(
    models: OpenModels,
    settings: TaskSettings,
    questions: Sequence[Question],
    *,
    projection: Projection | None = None,
    vocabulary: frozenset[str] | None = None,
    reward: WeightedReward | None = None,
) -> Task:
    """Return the task on training `questions` against open models, whose mutator knows all operators.

    `vocabulary` is the subject's, by default that of the models that answer; `reward` replaces that of the settings.
    """
    vocabulary = models.vocabulary if vocabulary is None else vocabulary
    operators = operator_registry.select(settings.operators)
    asked = [operator.name for operator in operators if local_rewrite(operator) is None]
    models.require_operators([*asked, *([ROUND_TRIP.name] if settings.answer == "round_trip" else [])])
    if settings.skip_unchanged:
        operators = models.with_local_tests(operators, vocabulary)
    judge = make_judge(models.calls, settings, seed=settings.seed)
    names = {"target_model": models.target_model, "mutator_model": models.mutator_model}
    return build_task(
        questions,
        calls=group_of(CallSettings, settings, by_rules=models.by_rules, **names),
        encoder=models.encoder,
        operators=operators,
        known_words=english_words() | vocabulary,
        embedding_dims=settings.embedding_dims,
        projection=projection,
        reward=reward or make_reward(settings, judge=judge),
        domain=settings.domain,
        rules=group_of(EpisodeRules, settings),
    )
