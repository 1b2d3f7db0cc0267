"""The reward of a run, and the judge in it: its model, its rubric, and the form in which it says yes or no."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from query_mutator.cli.console import note
from query_mutator.data.bundled import GRADED_BY
from query_mutator.errors import UsageError
from query_mutator.llm.checkup import JudgeForm
from query_mutator.llm.stack import ClientStack
from query_mutator.rewards import DEFAULT_RUBRIC, Judge, WeightedReward
from query_mutator.settings.episode import TaskSettings
from query_mutator.settings.questions import Judging
from query_mutator.types import SUCCESS_PARTS, Question

__all__ = ["REFERENCE_METRICS", "check_gold", "default_reward", "make_judge", "make_reward"]

REFERENCE_METRICS = tuple(name for name in SUCCESS_PARTS if name != "judge")  # that a judge is compared with
JUDGE_FORMS: Mapping[JudgeForm, str] = {
    "schema": "which keeps to a JSON schema",
    "logprobs": "by the probabilities of yes and no",
    "words": "by its first word: replies without a verdict leave steps unscored",
}


def default_reward(dataset: str) -> str:
    """Return the weights of the parts without --reward, "" for the usual ones: some sets are graded by one part."""
    return GRADED_BY.get(dataset, "")


def make_reward(settings: TaskSettings, *, judge: Judge | None = None) -> WeightedReward:
    """Return the reward of `--reward`; UsageError for an unknown part or weight, and for a judge without a model.

    A reward by a judge alone has `right` as a part of weight 0, with which the judge is compared.
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
    """Say how many questions have nothing to compare an answer with; UsageError where the reward compares and all do.

    A judge needs no gold.
    """
    weights = make_reward(settings).weights
    compares = next((name for name in SUCCESS_PARTS if weights.get(name)), None)
    bare = sum(not (one.accept or one.reference) for one in questions)
    if not bare or compares not in REFERENCE_METRICS:
        return
    if bare == len(questions):
        raise UsageError(
            f"{settings.dataset}: no question has `accept` or `reference`, with which --reward {compares} compares "
            "answers; add them, or score without gold: --reward answered, or a judge"
        )
    note(f"{settings.dataset}: {bare} of {len(questions)} questions have neither `accept` nor `reference`: never right")


def make_judge(calls: ClientStack, settings: Judging, *, seed: int | None) -> Judge | None:
    """Return the judge by a model, which the server was asked how to have it say yes or no; None without a model."""
    model, form, think = settings.judge_model, settings.judge_form, False
    if model is None:
        return None
    calls.require_models([model])
    if form == "auto":
        form, think = calls.judge_form(model)
        note(f"judge: {model}, {JUDGE_FORMS[form]}")
    return Judge(model=model, rubric=settings.judge_rubric or DEFAULT_RUBRIC, form=form, think=think, seed=seed)
