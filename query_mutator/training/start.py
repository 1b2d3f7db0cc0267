"""Bound what a run does before its first step by its own length.

    --answer learned         P(right) learned within a tenth of the calls of training
    periodic evaluations     within half as many calls as training makes, unless a flag says which

Recorded replies take no time: with them no evaluation is left out.
"""

from __future__ import annotations

from dataclasses import replace

from query_mutator.data import Split
from query_mutator.session.checkpoint import Checkpoint
from query_mutator.session.models import OpenModels
from query_mutator.training.config import TrainConfig
from query_mutator.training.estimate import Estimate, estimate, size_of
from query_mutator.training.timing import is_instant

__all__ = ["bounded", "bounded_start", "foreseen"]

SHARE, IN_WORDS = 1 / 2, "half"  # of the calls of training
ANSWERS_SHARE = 1 / 10  # of them, for the answers that P(right) is learned from
FEWEST_QUESTIONS = 20  # of a periodic evaluation


def foreseen(config: TrainConfig, checkpoint: Checkpoint | None) -> Estimate:
    """Return the size and cost of a run with what it will leave out; no server is started or asked."""
    size = estimate(config, checkpoint)
    now, more = bounded(size, is_live=not is_instant(config))
    return replace(size if now is config else estimate(now, checkpoint), decided=tuple(more))


def bounded_start(config: TrainConfig, models: OpenModels, split: Split) -> tuple[TrainConfig, list[str]]:
    """Return the settings of a run that was opened, as `bounded` does."""
    return bounded(size_of(config, split), is_live=not models.calls.backend_class.is_instant)


def bounded(size: Estimate, *, is_live: bool) -> tuple[TrainConfig, list[str]]:
    """Return the settings of a run with what was left open decided, and a line for each decision.

    No evaluation is left out unless a model `is_live`: other calls take next to no time.
    """
    config, lines = size.config, list[str]()
    if is_live and not {"eval_interval", "eval_questions"} & config.given:
        config, lines = _with_evaluations(config, size)
    if config.answer == "learned" and "answer_calls" not in config.given:
        config = replace(config, answer_calls=min(config.answer_calls, max(1, int(ANSWERS_SHARE * size.calls))))
    return config, lines


def _with_evaluations(config: TrainConfig, size: Estimate) -> tuple[TrainConfig, list[str]]:
    """Return the settings with as many periodic evaluations and questions as their share of the calls allows."""
    most = SHARE * config.total_steps / size.episodes.steps  # episodes
    fewest = min(FEWEST_QUESTIONS, size.evaluation_questions)
    if size.evaluations * size.evaluation_questions <= most:
        return config, []
    share = f"{IN_WORDS} of the {size.calls:,} calls of training"
    for every, times in ((config.updates_between_evals, size.evaluations), (config.num_updates, 2)):
        if (count := int(most / times)) >= fewest:
            line = f"periodic evaluations: {times} x {count} questions, {share}; --eval-questions N asks others"
            return replace(config, eval_interval=every, eval_questions=count), [line]
    line = f"periodic evaluations: none; two of {fewest} questions exceed {share}; --eval-questions N makes them"
    return replace(config, eval_interval=0), [line]
