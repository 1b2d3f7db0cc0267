"""What the benchmarks on a language model's recorded replies to `general` share."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from query_mutator.env.task import Task
from query_mutator.evaluation.comparison import Job
from query_mutator.learners import Plan, PlanPolicy, plan_task
from query_mutator.session.play import greedy
from query_mutator.training.config import TrainConfig, parse_config

CONFIG = Path(__file__).resolve().parents[1] / "examples" / "first_run.json"


def flags_of(arguments: argparse.Namespace) -> list[str]:
    """Return the flags of every training."""
    return ["--config", str(CONFIG), "--backend", "recorded", *arguments.flags.split()]


def config_of(argv: Sequence[str]) -> TrainConfig:
    """Return the settings of a run with these flags."""
    return parse_config(argv)


def plan_jobs(plans: Mapping[str, Plan], task: Task) -> list[Job]:
    """Return what asks all questions of a task by plans."""
    return [
        Job(name=name, task=partial(plan_task, plan)(task), player=greedy(PlanPolicy(plan)))
        for name, plan in plans.items()
    ]


def percent(rate: float, interval: Sequence[float], *, sign: str = "") -> str:
    """Return a rate and its interval in percent."""
    low, high = interval
    return f"{100 * rate:{sign}.1f} [{100 * low:{sign}.1f}, {100 * high:{sign}.1f}]"
