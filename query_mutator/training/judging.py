"""The reward of a run, and the judge in it: its model, its rubric, and the form in which it says yes or no."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from query_mutator.cli.console import note
from query_mutator.errors import UsageError
from query_mutator.llm.checkup import JudgeForm, judge_form
from query_mutator.llm.stack import ClientStack
from query_mutator.rewards import DEFAULT_RUBRIC, Judge, WeightedReward
from query_mutator.types import SUCCESS_PARTS

if TYPE_CHECKING:
    from query_mutator.training.system import TaskSettings

__all__ = ["YARDSTICKS", "make_judge", "make_reward", "rubric_text"]

YARDSTICKS = tuple(name for name in SUCCESS_PARTS if name != "judge")  # that a judge is compared with
JUDGE_FORMS: Mapping[JudgeForm, str] = {
    "schema": "which keeps to a JSON schema",
    "logprobs": "by the probabilities of yes and no",
    "words": "by its first word: replies without a verdict leave steps unscored",
}


def make_reward(settings: TaskSettings, *, judge: Judge | None = None) -> WeightedReward:
    """Return the reward of `--reward`; UsageError for an unknown part or weight, and for a judge without a model.

    A reward by a judge alone has `right` as a part of weight 0, with which the judge is compared.
    """
    reward = WeightedReward.parse(settings.reward, judge=judge) if settings.reward else WeightedReward()
    is_judged = "judge" in reward.weights
    if is_judged and settings.judge_model is None:
        raise UsageError(
            "--reward judge needs --judge-model: another model than the one that answers, which favors its own answers"
        )
    if settings.judge_model is not None and not is_judged:
        raise UsageError(f"--judge-model {settings.judge_model} has no part of the reward; add it as --reward judge=1")
    if is_judged and not set(YARDSTICKS) & set(reward.weights):
        return WeightedReward({**reward.weights, YARDSTICKS[0]: 0.0}, judge=judge)
    return reward


def make_judge(calls: ClientStack, settings: TaskSettings) -> Judge | None:
    """Return the judge of the settings, which the server was asked how to have it say yes or no; None without one."""
    if settings.judge_model is None:
        return None
    model, form, think = settings.judge_model, settings.judge_form, False
    calls.require_models([model])
    if form == "auto":
        form, think = judge_form(calls.servers[0], model)
        note(f"judge: {model}, {JUDGE_FORMS[form]}")
    rubric = settings.judge_rubric or DEFAULT_RUBRIC
    return Judge(model=model, rubric=rubric, form=form, think=think, seed=settings.seed)


def rubric_text(given: str) -> str:
    """Return the text of a rubric's file; a text, which has a line break, stays. UsageError for an unreadable file."""
    if not given or "\n" in given:
        return given
    try:
        text = Path(given).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise UsageError(f"--judge-rubric {given[:200]} cannot be read ({error}); give a file of UTF-8 text") from None
    if not text:
        raise UsageError(f"--judge-rubric {given} is empty; write when the judge is to say yes, and when no")
    return text + "\n"
