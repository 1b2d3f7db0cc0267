"""`qm eval --target-model A B C`: the evaluation of one policy with several models, a trial of an engine for each.

OUT/trials/NAME/report.json, evaluation.jsonl     the result of a model; a rerun evaluates the models without one
OUT/results.json                                  all of them
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from query_mutator.cli.common import JsonFlags, show
from query_mutator.cli.console import note
from query_mutator.cli.flags import words_of
from query_mutator.cli.outputs import write_report
from query_mutator.commands.engine import open_engine
from query_mutator.commands.eval_flags import EvalFlags
from query_mutator.errors import TooManyFailuresError, UsageError, hide_credentials
from query_mutator.files import decode_object, file_sha256
from query_mutator.files.lock import locked
from query_mutator.lab.sweep.config import EngineFlags
from query_mutator.lab.sweep.engines import Ended
from query_mutator.lab.sweep.plan import Trial
from query_mutator.lab.sweep.runner import Runner, SweepFolder
from query_mutator.report.table import models_table

__all__ = ["evaluate_models"]

_COMMAND = ("{python}", "-m", "query_mutator", "eval", "--json", "{dir}/report.json", "--evaluation",
            "{dir}/evaluation.jsonl", "--force")  # fmt: skip
#: Of the comparison and of each trial, but not of the command that all trials share.
_OWN = {one.name for cls in (EngineFlags, JsonFlags) for one in fields(cls)} | {
    "checkpoint", "run", "target_model", "seed", "evaluation", "out",
}  # fmt: skip


def evaluate_models(flags: EvalFlags, policy: Path) -> None:
    """Run the missing evaluations, then print a row for each model; `policy` is the file that holds the policy."""
    trials = {
        model: Trial(setting={"target_model": model}, seed=flags.seed) for model in dict.fromkeys(flags.target_model)
    }
    if len({trial.name for trial in trials.values()}) < len(trials):
        raise UsageError(f"--target-model {' '.join(trials)}: two of them make one folder name; evaluate them apart")
    words = words_of(flags, without=_OWN)
    about = {"command": hide_credentials(shlex.join(["qm", "eval", *words])), "policy": file_sha256(policy)}
    if flags.dataset and os.path.isfile(flags.dataset):
        about["dataset"] = file_sha256(Path(flags.dataset))
    out = Path(flags.out or Path("evaluations") / Path(flags.checkpoint).resolve().name)
    command = [*_COMMAND, "--checkpoint", str(Path(flags.checkpoint).resolve()), *words]
    with open_engine(flags, str(out)) as engine, locked(out, break_lock=flags.break_lock):
        folder = SweepFolder(out, **about)
        ended = Runner(folder, engine, command=command).run([*trials.values()], retry_failed=flags.retry_failed)
        found = {model: _report(folder.folder_of(trial) / "report.json") for model, trial in trials.items()}
        results = {"models": {model: report for model, report in found.items() if report}}
        write_report(out / "results.json", results)
    show(flags, results, models_table(found))
    note(str(out / "results.json"))
    _check({model: ended[trial.name] for model, trial in trials.items() if trial.name in ended})


def _check(ended: Mapping[str, Ended]) -> None:
    """Print why evaluations failed; raise TooManyFailuresError for any."""
    failed = {model: one for model, one in ended.items() if one.status != "done"}
    for model, one in failed.items():
        note(f"{model}: {one.status} (exit code {one.exit_code}): {one.says or 'stderr is empty'}")
    if failed:
        raise TooManyFailuresError(f"{len(failed)} of {len(ended)} evaluations failed; --retry-failed runs them again")


def _report(path: Path) -> Mapping[str, Any] | None:
    try:
        return decode_object(path.read_bytes())
    except FileNotFoundError:
        return None
