"""Make the task of a run: its questions and the rules of an episode, against models that are open."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from query_mutator import forms as form_registry
from query_mutator import operators as operator_registry
from query_mutator.bounds import group_of
from query_mutator.cli.console import note
from query_mutator.confidence import ConfidenceModel
from query_mutator.data import (
    BUNDLED,
    GENERAL_2,
    QuestionSet,
    Split,
    general_bank,
    guard_questions,
    hub,
    load_question_set,
    split_questions,
)
from query_mutator.env.episode import EpisodeRules, Projection
from query_mutator.env.task import CallSettings, Task, build_task
from query_mutator.errors import DatasetError, KeywordError, UsageError
from query_mutator.forms import Form
from query_mutator.llm.prices import read_prices
from query_mutator.operators import NONE, Operator, local_rewrite
from query_mutator.registry import nearest
from query_mutator.rewards import DEFAULT_RUBRIC, Judge, WeightedReward
from query_mutator.session.models import OpenModels, open_models
from query_mutator.settings import RECORDED_SET, ModelSettings, Operators, TaskSettings
from query_mutator.types import SUCCESS_PARTS, Question

REFERENCE_METRICS = tuple(name for name in SUCCESS_PARTS if name != "judge")  # that a judge is compared with
NO_DATASET = "none"  # of a plan that was learned from a log

_running: dict[ModelSettings, tuple[OpenModels, int]] = {}  # with the number of users


def default_reward(dataset: str) -> str:
    """Return the weights of the parts without --reward, "" for the usual ones: some sets are graded by one part."""
    return "right" if dataset in (RECORDED_SET, str(GENERAL_2)) else ""


def make_reward(settings: TaskSettings, *, judge: Judge | None = None) -> WeightedReward:
    """Return the reward of the settings, by default that of the set; UsageError for an unknown part or weight.

    It is one too for a judge without a model. A reward by a judge alone has `right` as a part of weight 0, with which
    the judge is compared.
    """
    judge_model = settings.judge_model
    spec = settings.reward or default_reward(settings.dataset)
    reward = WeightedReward.parse(spec, judge=judge) if spec else WeightedReward()
    is_judged = "judge" in reward.weights
    if is_judged and judge_model is None:
        raise UsageError(
            "--reward judge needs --judge-model: another model than the one that answers, which favors its own answers"
        )
    if judge_model is not None and not is_judged:
        raise UsageError(f"--judge-model {judge_model} has no part of the reward; add it as --reward judge=1")
    if is_judged and not set(REFERENCE_METRICS) & set(reward.weights):
        return WeightedReward({**reward.weights, REFERENCE_METRICS[0]: 0.0}, judge=judge)
    return reward


def check_gold(questions: Sequence[Question], settings: TaskSettings) -> None:
    """Say how many questions are never right for lack of gold; UsageError if the reward compares and none has any."""
    weights = make_reward(settings).weights
    compares = next((name for name in SUCCESS_PARTS if weights.get(name)), None)
    if compares == "right" and any(one.reference for one in questions) and not any(one.accept for one in questions):
        note(
            f"{settings.dataset}: no question has `accept`, so none is answered right; --reward similarity=1 compares "
            "answers with `reference`"
        )
        return
    graded = sum(bool(one.accept or (one.reference and compares != "right")) for one in questions)
    if graded == len(questions) or compares not in REFERENCE_METRICS:
        return
    if not graded:
        raise UsageError(
            f"{settings.dataset}: no question has `accept` or `reference`, with which --reward {compares} compares "
            "answers; add them, or score without gold: --reward answered, or a judge"
        )
    lacking = "no `accept`" if compares == "right" else "neither `accept` nor `reference`"
    note(f"{settings.dataset}: {len(questions) - graded} of {len(questions)} questions have {lacking}: never right")


def read_dataset(settings: TaskSettings, *, for_training: bool = True) -> QuestionSet:
    """Return the questions of `settings.dataset`, the name of a bundled set or a file.

    Bundled sets come with the bundled requests that should be refused.
    """
    dataset = settings.dataset
    if dataset in BUNDLED and not os.path.exists(dataset):
        for name in ("question_column", "answer_column"):
            if getattr(settings, name) is not None:
                raise UsageError(f"--{name.replace('_', '-')} is for a file; {dataset} has its own columns")
        return QuestionSet(questions=BUNDLED[dataset](), guard=tuple(guard_questions()))
    _check_not_held_out(dataset, for_training=for_training)
    paths, source = ([Path(dataset)], {}) if not dataset.startswith(hub.PREFIX) else hub.fetch(dataset)
    if not source and not os.path.splitext(dataset)[1] and not os.path.exists(dataset):
        sets = ", ".join(BUNDLED)
        raise DatasetError(
            f"{dataset}: no such file; give a .jsonl, .json, .csv or .parquet file, hf:NAME, or a bundled set: {sets}"
        )
    found = load_question_set(
        paths, name=dataset, question_column=settings.question_column, answer_column=settings.answer_column
    )
    if not found.questions:
        raise DatasetError(
            f"{dataset}: all {len(found.guard)} rows are marked unsafe; they serve the guard metric only, next to "
            "other questions"
        )
    return replace(found, source=source)


def _check_not_held_out(dataset: str, *, for_training: bool) -> None:
    """Raise for the name of a set that something else opens, or for training on the file of one."""
    path = Path(dataset)
    is_file = for_training and os.path.realpath(path) == os.path.realpath(GENERAL_2)
    if is_file or (dataset == "general-2" and not path.exists()):
        raise DatasetError(
            f"{dataset}: only for evaluation, by `python -m benchmarks.second_author`; to train or choose use "
            f"{', '.join(BUNDLED)}"
        )


def split_dataset(settings: TaskSettings) -> Split:
    """Return the hash-stable split of the dataset, with the validation fold of the settings taken from `train`."""
    found = read_dataset(settings)
    split = split_questions(found.questions, settings.validation_fold)
    return replace(split, guard=found.guard, source=found.source)


def example_bank(dataset: str) -> list[Question] | None:
    """Return the questions with answers that a bundled set has for examples, None for a set without them."""
    return general_bank() if dataset == RECORDED_SET and not Path(dataset).exists() else None


def guard_requests(own: Sequence[Question], *, with_bundled: bool) -> tuple[Question, ...]:
    """Return the requests of a set that should be refused, after the bundled ones where these are wanted too."""
    known = {question.id for question in own}
    bundled = guard_questions() if with_bundled else ()
    return (*(question for question in bundled if question.id not in known), *own)


def rewrites(settings: Operators, models: Sequence[str] = ()) -> tuple[tuple[Operator, ...], tuple[Form, ...]]:
    """Return the operators and forms of a policy's first actions; UsageError for a name that is both.

    Several `models` are asked as the question is worded, with the operators and in the forms that are named, if any.
    """
    named, words = settings.forms, settings.operators
    if len(models) > 1:
        named, words = NONE if named == Operators.forms else named, words or NONE
    operators, forms = operator_registry.select(words), form_registry.select(named, models, samples=settings.samples)
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
    operators, forms = rewrites(settings, models.targets)
    operators = _available(operators, models, is_default=not settings.operators)
    judge, rubric = None, settings.judge_rubric or DEFAULT_RUBRIC
    if settings.judge_model is not None:
        models.calls.require_models([settings.judge_model])
        judge = Judge(model=settings.judge_model, rubric=rubric, seed=settings.seed)
    names = {"target_model": models.target_model, "mutator_model": models.mutator_model}
    return build_task(
        questions,
        calls=group_of(
            CallSettings,
            settings,
            samples_at_once=max(1, settings.samples - 1) if learns else 1,
            logprobs=learns or (confidence is not None and confidence.reads_logprobs),
            **names,
        ),
        encoder=models.encoder,
        operators=operators,
        embedding_dims=settings.embedding_dims,
        projection=projection,
        reward=reward or make_reward(settings, judge=judge),
        domain=settings.domain,
        rules=group_of(EpisodeRules, settings),
        forms=forms,
        bank=example_bank(settings.dataset) or bank,
        confidence=confidence,
        prices=read_prices(models.settings.price, models.targets) if models.has_prices else {},
        recorded=models.choice.recording and models.choice.recording.find,
    )


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
            hint = f", did you mean {near!r}?" if near else ""  # torchrl reads the beginning
            raise KeywordError(f"unexpected keyword argument {name!r}{hint}; known: {', '.join(known)}")
    given: dict[str, Any] = {"cache": "off", "seed": 0, "validation_fold": "none", **keywords}
    return (
        ModelSettings(**{name: value for name, value in given.items() if name in model_names}),
        TaskSettings(**{name: value for name, value in given.items() if name in task_names}),
    )
