"""What learners reach after so many training calls on a language model's recorded replies, the calls for P(right) too.

    python -m benchmarks.call_curves --json curves.json

Each seed learns P(right) and then a policy from four fifths of the training questions of `general`, and is scored on
the fifth, at one price of a call. Scores are taken during one training, at the end of the rollout in which the calls
were made. "plan" is the plan of `qm plan --answer learned` with so many calls that is worth most at that price.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from benchmarks.general import CONFIG, config_of
from benchmarks.learning import FOLDS, World, summary, task_settings, train_seed
from query_mutator.bounds import group_of
from query_mutator.cli.console import table
from query_mutator.encoder.documents import cache_dir
from query_mutator.env.task import Task
from query_mutator.evaluation.methods import by_policy
from query_mutator.evaluation.plan_search import find_plan
from query_mutator.files import write_json
from query_mutator.learners.learner import InferencePolicy
from query_mutator.learners.plan import plan_policy, plan_task
from query_mutator.session.dataset import split_dataset
from query_mutator.settings.models import ModelSettings

LEARNERS = ("direct", "iqn", "ppo")
PLAN = "plan"
CALLS = (2_000, 3_000, 4_500, 6_000, 8_000)
PRICE = 0.02  # of a call
ARGV = (
    "--config examples/first_run.json --backend recorded --answer-calls {answers} --validation-fold {fold}"
    " --seed {seed}"
)


def curve_of(world: World, algo: str, argv: Sequence[str], calls: Sequence[int]) -> list[tuple[float, float]]:
    """Return success and calls per question, in percent and calls, after so many training calls each."""
    config = config_of([*argv, "--algo", algo, "--num-env-steps", str(max(calls))])
    validation = split_dataset(task_settings(config)).validation
    found: list[tuple[float, float]] = []

    def score(policy: InferencePolicy, task: Task, made: float) -> None:
        while len(found) < len(calls) and made >= calls[len(found)]:
            held_out = task.on(validation).with_rules(call_price=(PRICE,))
            scored = summary(world.evaluator.run(held_out, by_policy(policy)))
            found.append((scored.success, scored.calls))

    trained = train_seed(world, config, max_calls=max(calls), on_rollout=score)
    score(trained.policy, trained.task, math.inf)  # the steps may end before the calls
    return found


def plan_curve(world: World, argv: Sequence[str], calls: Sequence[int]) -> list[tuple[float, float]]:
    """Return the same of plans, each from a search of its own; NaN where too few calls teach no P(right)."""
    config = config_of(argv)
    settings = task_settings(config)
    task = world.task_of(settings).with_rules(ask="form", max_asks=None)
    held_out, found = task.on(split_dataset(settings).validation), []
    for most in calls:
        search = find_plan(world.evaluator, task, max_calls=most, seed=config.seed, learned=True)
        if search.confidence is None:
            found.append((math.nan, math.nan))
            continue
        plan = max(search.points, key=lambda point: point.success - PRICE * point.calls).plan
        acting = replace(plan_task(plan, held_out), confidence=search.confidence)
        scored = summary(world.evaluator.run(acting, by_policy(plan_policy(plan, held_out))))
        found.append((scored.success, scored.calls))
    return found


def run(world: World, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the curves [seeds, calls, 2] by learner."""
    found: dict[str, Any] = {name: [] for name in arguments.only}
    for seed in arguments.seeds:
        argv = ARGV.format(config=CONFIG, answers=arguments.answers, fold=FOLDS[seed % len(FOLDS)], seed=seed).split()
        for name in arguments.only:
            started = time.perf_counter()
            found[name].append(plan_curve(world, argv, CALLS) if name == PLAN else curve_of(world, name, argv, CALLS))
            print(f"{name}, seed {seed}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
    return {"calls": CALLS, "price": PRICE, "answers": arguments.answers, "curves": found}


def in_words(found: dict[str, Any]) -> str:
    """Return two tables: right at calls per question, and percent right minus the price of the calls."""
    columns = ("training calls", *(f"{calls:,}" for calls in found["calls"]))
    curves = {name: np.array(curve, np.float64) for name, curve in found["curves"].items()}
    reached = [
        (name, *(f"{right:.1f} at {calls:.2f}" for right, calls in curve.mean(axis=0)))
        for name, curve in curves.items()
    ]
    worth = {name: curve[..., 0] - 100 * found["price"] * curve[..., 1] for name, curve in curves.items()}
    net = [
        (name, *(f"{mean:.1f} ± {sd:.1f}" for mean, sd in zip(of.mean(axis=0), of.std(axis=0, ddof=1), strict=True)))
        for name, of in worth.items()
    ]
    seeds = len(next(iter(curves.values())))
    return "\n\n".join([
        table(f"right, %, at calls per question; {seeds} seeds", columns, reached),
        table(f"right, %, minus {100 * found['price']:g} for each call; ± of seeds and folds", columns, net),
    ])  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Print the tables; write the curves as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(1, 9)))
    parser.add_argument("--only", nargs="+", default=[*LEARNERS, PLAN], choices=[*LEARNERS, PLAN])
    parser.add_argument("--answers", type=int, default=900, help="calls to learn P(right) from")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    world = World(group_of(ModelSettings, config_of(["--backend", "recorded"])), cache_dir() / "general")
    with world.system:
        found = run(world, arguments)
    if arguments.json is not None:
        write_json(arguments.json, found)
    print(in_words(found))


if __name__ == "__main__":
    main()
