"""What each operator and each form brings alone: gain over the question as it stands, calls, tokens and seconds.

    python -m benchmarks.arms --flags "--gguf smollm2"
    python -m benchmarks.arms --flags "--backend recorded --dataset general --target-max-tokens 32 --operators clean"
    python -m benchmarks.arms --flags "--gguf smollm2 --dataset general --target-max-tokens 32" --questions 100

Questions are training questions, a fixed sample; operators and forms are all that there are unless the flags name some,
but for `write`, which needs a mutator that was trained.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from benchmarks.general import plan_jobs
from query_mutator import operators
from query_mutator.cli.console import table
from query_mutator.data.split import target_key
from query_mutator.env.task import Task
from query_mutator.evaluation.heldout import fixed_sample
from query_mutator.evaluation.methods import Evaluator, Found
from query_mutator.evaluation.outcomes import Outcome, mean
from query_mutator.files import write_json
from query_mutator.learners.plan import Plan
from query_mutator.session.dataset import split_dataset
from query_mutator.session.models import open_models
from query_mutator.session.task import make_task
from query_mutator.stats.paired import difference_interval
from query_mutator.training.config import parse_config

ORIGINAL = "as it stands"


def rows_of(task: Task, found: Found) -> list[dict[str, Any]]:
    """Return a row for each plan, the largest gain first."""
    keys = [target_key(question) for question in task.questions]
    original, rows = rights(found[ORIGINAL]), []
    for name, outcomes in found.items():
        scored, gains = list(outcomes.values()), rights(outcomes) - original
        rows.append(
            {
                "name": name,
                "success": mean(scored, "success"),
                "gain": float(np.nanmean(gains)),
                "ci": list(difference_interval(gains, keys)),
                "changed": float(
                    np.mean([outcome.rewrite != q.text for outcome, q in zip(scored, task.questions, strict=True)])
                ),
                "rejected": sum(len(outcome.rejected) for outcome in scored),
                **{measure: mean(scored, measure) for measure in ("calls", "tokens", "seconds")},
            }
        )
    return sorted(rows, key=lambda row: -row["gain"])


def rights(outcomes: dict[int, Outcome]) -> Any:
    """Return 1 for each right answer [n], NaN for a question without one."""
    return np.array([np.nan if one.error else float(one.is_right) for one in outcomes.values()])


def main(argv: Sequence[str] | None = None) -> None:
    """Ask all questions by each operator and form, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flags", default="--backend recorded", help="of the trainer: models, questions, token limits")
    parser.add_argument("--questions", type=int, default=sys.maxsize, help="most questions to ask")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    everything = ",".join(name for name in operators.OPERATORS.registered())
    config = parse_config(["--operators", everything, "--forms", "all", *arguments.flags.split()])
    with open_models(config) as models:
        train = split_dataset(config).train
        task = make_task(models, config, train)
        task = task.on(fixed_sample(task.train_questions, min(arguments.questions, len(train))))
        plans = {ORIGINAL: Plan()} | {name: Plan(steps=(name,)) for name in task.actions[: task.num_rewrites]}
        found = Found()
        evaluator = Evaluator.of(models, max_failure_rate=config.max_failure_rate)
        evaluator.run_all(plan_jobs(plans, task), found, title="arms")
    rows = rows_of(task, found)
    print(
        table(
            f"{len(task.questions)} training questions of {config.dataset}, {models.target_model}",
            ("", "success", "gain", "changed", "rejected", "calls", "tokens", "seconds"),
            [
                (
                    row["name"],
                    f"{100 * row['success']:.1f}",
                    f"{100 * row['gain']:+.1f} [{100 * row['ci'][0]:+.1f}, {100 * row['ci'][1]:+.1f}]",
                    f"{row['changed']:.0%}",
                    str(row["rejected"]),
                    f"{row['calls']:.2f}",
                    f"{row['tokens']:.0f}",
                    f"{row['seconds']:.2f}",
                )
                for row in rows
            ],
        )
    )
    if arguments.json is not None:
        write_json(arguments.json, {"flags": arguments.flags, "questions": len(task.questions), "rows": rows})


if __name__ == "__main__":
    main()
