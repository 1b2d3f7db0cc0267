"""Bound what a run does before its first step by its own length and by the speed of its calls.

    --answer learned         P(right) learned within a tenth of the calls of training
    --teacher auto           a search within as many, and 15 minutes; or no teacher
    periodic evaluations     within as many, unless a flag says which

Recorded replies take no time: with them nothing is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from query_mutator.cli.console import progress
from query_mutator.data import Split
from query_mutator.env.task import Task
from query_mutator.llm.probe import reported_slots
from query_mutator.operators import local_rewrite
from query_mutator.session.checkpoint import Checkpoint
from query_mutator.session.models import OpenModels
from query_mutator.session.pace import keep_pace, kept_pace, measure_pace
from query_mutator.training.config import AUTO_TEACHER, SEARCH, TrainConfig
from query_mutator.training.estimate import Estimate, duration, estimate, size_of
from query_mutator.training.timing import call_time, is_instant
from query_mutator.types import ErrorInfo

__all__ = ["bounded", "bounded_start", "foreseen"]

SHARE, IN_WORDS = 1 / 2, "half"  # of the calls of training
ANSWERS_SHARE = 1 / 10  # of them, for the answers that P(right) is learned from
MOST_SEARCH_S = 900.0
FEWEST_SEARCH_CALLS = 960  # fewer score fewer than about 48 questions, which says little about a plan
FEWEST_QUESTIONS = 20  # of a periodic evaluation

#: Returns the seconds of a call divided by the calls in flight, None where a call fails.
CallTime = Callable[[], float | None]


def foreseen(config: TrainConfig, checkpoint: Checkpoint | None) -> Estimate:
    """Return the size and cost of a run with what it will leave out; no server is started or asked."""
    size = estimate(config, checkpoint)
    known = None if is_instant(config) else lambda: call_time(config, config, operators=config.operators)[0]
    now, more = bounded(size, call_time=known)
    return replace(size if now is config else estimate(now, checkpoint), decided=tuple(more))


def bounded_start(
    config: TrainConfig, models: OpenModels, task: Task, split: Split
) -> tuple[TrainConfig, Sequence[str]]:
    """Return the settings of a run that was opened, as `bounded` does; a live model's speed is measured if need be."""
    known = None if models.calls.backend_class.is_instant else lambda: _measured(config, models, task)
    return bounded(size_of(config, split), call_time=known)


def bounded(size: Estimate, *, call_time: CallTime | None) -> tuple[TrainConfig, Sequence[str]]:
    """Return the settings of a run with what was left open decided, and a line for each decision.

    `call_time` is None where calls take next to no time.
    """
    config, lines = size.config, []
    if call_time is not None and not {"eval_interval", "eval_questions"} & config.given:
        config, line = _with_evaluations(config, size)
        lines += line
    if config.answer == "learned" and "answer_calls" not in config.given:
        config = replace(config, answer_calls=min(config.answer_calls, max(1, int(ANSWERS_SHARE * size.calls))))
    if config.teacher == AUTO_TEACHER:
        config, line = _with_teacher(config, size.calls, call_time)
        lines += line
    return config, lines


def _with_teacher(config: TrainConfig, calls: int, call_time: CallTime | None) -> tuple[TrainConfig, list[str]]:
    """Return the settings with `search` or no teacher in place of `auto`, and why."""
    without = replace(config, teacher=None)
    if fault := config.teacher_fault or (not config.plan_calls and "--plan-calls 0 allows no search"):
        return without, [f"teacher: none; {fault.partition(';')[0]}"]
    if call_time is None:
        return replace(config, teacher=SEARCH), []
    most, why = int(SHARE * calls), f"{IN_WORDS} of the {calls:,} of training"
    if config.plan_calls <= most:
        most, why = config.plan_calls, "--plan-calls"
    fewest = min(FEWEST_SEARCH_CALLS, config.plan_calls)
    call_s = call_time() if most >= fewest else None
    if call_s and most * call_s > MOST_SEARCH_S:
        most, why = int(MOST_SEARCH_S / call_s), f"those of {duration(MOST_SEARCH_S)} at {call_s:.2g} s a call"
    if most < fewest:
        instead = "--teacher search --plan-calls N searches all the same"
        return without, [f"teacher: none; a search takes {fewest:,} calls or more, {why} are {most:,}; {instead}"]
    time = f", about {duration(most * call_s)}" if call_s else ""
    return replace(config, teacher=SEARCH, plan_calls=most), [
        f"teacher: the best plan of a search with at most {most:,} calls ({why}){time}"
    ]


def _with_evaluations(config: TrainConfig, size: Estimate) -> tuple[TrainConfig, list[str]]:
    """Return the settings with as many periodic evaluations and questions as their share of the calls allows."""
    most = SHARE * config.total_steps / size.play.steps  # episodes
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


def _measured(config: TrainConfig, models: OpenModels, task: Task) -> float | None:
    """Return the seconds of a call: those that were kept for such a run, else measured now with its questions."""
    pace = kept_pace(config, config, mutator=config.mutator_model)
    if pace is None:
        slots = reported_slots(models.calls.servers, models.target_model) or config.calls_in_flight
        asking = [operator for operator in task.operators if local_rewrite(operator) is None]
        at_once = min(slots, config.calls_in_flight)
        with progress("measuring calls", None, unit="call", terminal_only=True):
            found = measure_pace(models.calls.limit, task.calls, task.questions, asking, at_once=at_once)
        if isinstance(found, ErrorInfo):
            return None
        keep_pace(found, config, config, mutator=config.mutator_model)
        pace = found
    return pace.call_s_with(task.operators) / min(pace.at_once, config.calls_in_flight)
