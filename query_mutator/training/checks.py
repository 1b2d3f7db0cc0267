"""Checks of a run before anything is loaded or started: its questions, its machine, its checkpoint, its bounds."""

from __future__ import annotations

from query_mutator.bounds import group_of
from query_mutator.cli.console import note
from query_mutator.data import Split
from query_mutator.env.rules import EpisodeRules
from query_mutator.errors import UsageError
from query_mutator.evaluation.cost import PLAN_CALLS, EvaluationCost
from query_mutator.llm.backends import choose_backend
from query_mutator.operators import local_rewrite
from query_mutator.session.checkpoint import Checkpoint
from query_mutator.session.dataset import guard_requests
from query_mutator.session.judging import check_gold, make_reward
from query_mutator.session.task import rewrites
from query_mutator.training.config import TrainConfig

__all__ = ["check_run", "comparison"]


def check_run(config: TrainConfig, split: Split, checkpoint: Checkpoint | None) -> None:
    """Raise a UsageError for settings that do not fit the questions, the machine or the checkpoint."""
    import torch

    from ppo.algorithm import usable_device

    if split.validation and not split.train:
        raise UsageError(
            f"{config.dataset}: --validation-fold {config.validation_fold} takes all {len(split.validation)} questions "
            "that are not held out; give another fold, or none"
        )
    if not split.train:
        raise UsageError(f"{config.dataset}: no question is left to train on, all are held out; add more questions")
    choose_backend(config.backend, config.urls)
    check_gold([*split.train, *split.validation, *split.test], config)
    if config.evaluate and not split.test:
        note(f"{config.dataset}: no question is held out, so the run ends without a comparison; add more questions")
    comparison(config, split)
    operators, forms = rewrites(config)
    actions = [*(one.name for one in operators), *(one.name for one in forms), *group_of(EpisodeRules, config).controls]
    if checkpoint is not None:
        checkpoint.check_actions(actions)
    try:
        usable_device(config.device)
    except ValueError as error:
        raise UsageError(str(error)) from error
    # A small network gains nothing from more threads, and waiting ones compete with those that make calls.
    torch.set_num_threads(1)


def comparison(config: TrainConfig, split: Split) -> tuple[int, int]:
    """Return the calls of the final comparison at most, and the held-out questions that are sure to be asked.

    UsageError when --eval-calls does not allow one question.
    """
    operators, forms = rewrites(config)
    asked = sum(local_rewrite(operator) is None for operator in operators)
    cost = EvaluationCost(
        num_test=len(split.test),
        num_guard=len(guard_requests(split.guard, with_bundled=config.guard)),
        num_train=len(split.train),
        num_operators=len(operators) + len(forms),
        num_asked=asked,
        episode_calls=group_of(EpisodeRules, config).max_calls(asked=asked),
        asking=make_reward(config).asking,
        search_calls=config.plan_calls,
        plan_calls=PLAN_CALLS if config.plan_calls else 0,
    )
    return min(cost.calls, config.eval_calls or cost.calls), cost.within(config.eval_calls).num_test
