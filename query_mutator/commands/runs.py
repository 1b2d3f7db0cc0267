"""`qm runs` and `qm compare`: the runs in a folder, the newest last, and runs compared question by question.

qm compare runs/a runs/b                              the policies of two runs
qm compare runs/a runs/a --method best_plan policy    two methods of one run
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from query_mutator.cli.console import table
from query_mutator.cli.flags import Positional
from query_mutator.cli.outputs import JsonFlags, show
from query_mutator.errors import UsageError
from query_mutator.files.run_dir import list_runs
from query_mutator.report.table import compare_entries, paired_text, read_entry

_HEADER = ("run", "state", "steps", "valid", "held-out", "calls", "age")
_AGES = ((86_400.0, "d"), (3600.0, "h"), (60.0, "min"))
MOST_RUNS = 26  # letters


@dataclass(frozen=True, kw_only=True)
class RunsFlags(JsonFlags):
    """List runs, the newest last: state, steps, success in percent on validation and held-out questions, calls, age.

    A killed run left its lock behind; `--resume` continues it, as it does an interrupted one.
    """

    folder: Positional[str] = "runs"
    """Folder of run folders, or one run folder."""


def show_runs(flags: RunsFlags) -> None:
    """Print the table of runs, or write the list with --json."""
    runs = list_runs(Path(flags.folder))
    started = [datetime.fromtimestamp(run["started"]).astimezone().isoformat(timespec="seconds") for run in runs]
    data = {"runs": [{**run, "started": at} for run, at in zip(runs, started, strict=True)]}
    now, count = time.time(), f"{len(runs)} run{'s' if len(runs) > 1 else ''}"
    text = table(f"{count} in {flags.folder}", _HEADER, [_row(run, now) for run in runs])
    show(flags, data, text if runs else f"no runs in {flags.folder}")


def _row(run: Mapping[str, Any], now: float) -> tuple[str, ...]:
    asked = "" if run["steps_asked"] is None else f"/{run['steps_asked']}"
    return (
        run["name"],
        run["state"],
        "" if run["steps"] is None else f"{run['steps']}{asked}",
        _percent(run["validation_success"]),
        _percent(run["held_out_success"]),
        "" if run["calls"] is None else f"{run['calls']:,}",
        _age(now - run["started"]),
    )


def _percent(rate: float | None) -> str:
    return "" if rate is None else f"{100 * rate:.1f}"


def _age(seconds: float) -> str:
    for size, unit in _AGES:
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


@dataclass(frozen=True, kw_only=True)
class CompareFlags(JsonFlags):
    """Compare Query Mutator runs question by question: gained, lost, same, McNemar's p, the difference, its interval.

    Only questions that two runs have in common count. For metrics over steps, several seeds, or runs of any trainer,
    use `qm analyze`.
    """

    runs: Positional[tuple[str, ...]] = ()
    """Run folders, or files of `qm eval --evaluation`: 2 or more."""
    method: tuple[str, ...] = ("policy",)
    """Method of the evaluation to compare, as policy, best_plan or identity: one for all runs, or one for each."""

    def __post_init__(self) -> None:
        if not 2 <= len(self.runs) <= MOST_RUNS:
            raise ValueError(f"runs named: {len(self.runs)}; give 2 to {MOST_RUNS}, one may be given twice")
        if len(self.method) not in (1, len(self.runs)):
            raise ValueError(
                f"--method has {len(self.method)} names for {len(self.runs)} runs; give one, or one for each"
            )
        if len({(Path(run).resolve(), method) for run, method in self.named()}) < len(self.runs):
            raise ValueError("a run is compared with itself; give another run, or a --method for each")

    def named(self) -> list[tuple[Path, str]]:
        """Return path and method of each run."""
        methods = self.method if len(self.method) > 1 else self.method * len(self.runs)
        return [(Path(run), method) for run, method in zip(self.runs, methods, strict=True)]


def compare_runs(flags: CompareFlags) -> None:
    """Print the paired table, or write it with --json."""
    for path, _ in flags.named():
        if not path.exists():
            raise UsageError(f"{path}: no such run; give a run folder (qm runs lists them)")
    report = compare_entries([read_entry(path, method) for path, method in flags.named()])
    show(flags, report, paired_text(report))
