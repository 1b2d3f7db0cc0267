"""Plans for a genuine language model, made without a search."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from query_mutator.bounds import group_of
from query_mutator.commands.plan_run import PlanFlags, plan_run
from query_mutator.learners.plan import Plan
from query_mutator.session.models import open_models
from query_mutator.session.policy_file import POLICY_FILE
from query_mutator.session.task import make_task, split_dataset
from query_mutator.settings.episode import TaskSettings

TRAINING = [
    {"id": "a", "query": "What is the capital of Italy?", "accept": ["Rome"], "tags": ["family:capital"]},
    {"id": "b", "query": "What is the capital of Spain?", "accept": ["Madrid"], "tags": ["family:capital"]},
    {"id": "c", "query": "What is the capital of Peru?", "accept": ["Lima"], "tags": ["family:capital"]},
]


def plan_file(folder: Path, steps: Sequence[str], **flags: Any) -> Path:
    """Return the policy file of a plan, in a folder for its run."""
    (folder / "questions.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in TRAINING))
    given = PlanFlags(
        encoder="hash",
        dataset=str(folder / "questions.jsonl"),
        reward="committed=1",
        max_asks=1,
        batch_size=1,
        cache="off",
        save_dir=str(folder),
        **flags,
    )
    settings = group_of(TaskSettings, given, ask="form", validation_fold="none")
    split = split_dataset(settings)
    with ExitStack() as stack:
        models = stack.enter_context(open_models(given))
        task = make_task(models, settings, split.train)
        run = stack.enter_context(plan_run(given, models, task))
        run.begin(given, settings, split)
        run.save(Plan(steps=tuple(steps)))
        return Path(shutil.copy(run.run_dir.path / POLICY_FILE, folder / "plan.qm"))
