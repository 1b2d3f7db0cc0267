"""Every point of chosen tags as CSV, or a list of the tags there are."""

from __future__ import annotations

import csv
import fnmatch
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from tyro.conf import Positional

from query_mutator.analysis.runs import Run, find_runs, load_runs
from query_mutator.analysis.series import Series
from query_mutator.cli.console import note, run_cli, table
from query_mutator.cli.flags import parse_flags
from query_mutator.errors import UsageError
from query_mutator.files import disk_errors
from query_mutator.registry import nearest


@dataclass(frozen=True, kw_only=True)
class ExtractFlags:
    """Write every point of the chosen tags as CSV: run, tag, step, seconds since the run's start, value."""

    runs: Positional[tuple[str, ...]] = ()
    """Run folders, event files, or names under --logdir, then under runs/."""
    logdir: str | None = None
    """Folder of run folders."""
    tag: tuple[str, ...] = ()
    """Tags, * stands for anything; without, the tags there are are listed."""
    csv: str | None = None
    """File to write to; by default the terminal."""
    merge: bool = True
    """Take RUN_2 beside RUN as its continuation when it goes on where RUN was."""

    def __post_init__(self) -> None:
        if not self.runs:
            raise ValueError("no run is named; give run folders, or names under --logdir")


def main(argv: Sequence[str]) -> int:
    """Extract as the command line says; return the exit code."""
    flags = parse_flags(ExtractFlags, argv, prog="extract_tensorboard_data.py")
    runs = load_runs(find_runs(flags.runs, logdir=flags.logdir), merge_suffixed=flags.merge)
    if not flags.tag:
        print(_listing(runs))
        return 0
    chosen = list(_chosen(runs, flags.tag))
    with ExitStack() as exits:
        out: TextIO = sys.stdout
        if flags.csv is not None:
            with disk_errors(flags.csv):
                out = exits.enter_context(Path(flags.csv).open("w", encoding="utf-8", newline=""))
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(("run", "tag", "step", "time_s", "value"))
        for run, tag, series in chosen:
            columns = series.step.tolist(), series.wall.tolist(), series.value.tolist()
            writer.writerows((run.name, tag, *row) for row in zip(*columns, strict=True))
    if flags.csv is not None:
        note(flags.csv)
    return 0


def run() -> None:
    """Run the command and end the process."""
    run_cli(main, prog="extract_tensorboard_data")


def _chosen(runs: Sequence[Run], patterns: Sequence[str]) -> Iterator[tuple[Run, str, Series]]:
    known = sorted({tag for run in runs for tag in run.series})
    for pattern in patterns:
        if not fnmatch.filter(known, pattern):
            near = nearest(pattern, known)
            raise UsageError(
                f"no run has a tag {pattern!r}; "
                + (f"did you mean {near!r}?" if near else "leave --tag out to see them")
            )
    for found in runs:
        for tag, series in found.series.items():
            if any(fnmatch.fnmatchcase(tag, pattern) for pattern in patterns):
                yield found, tag, series


def _listing(runs: Sequence[Run]) -> str:
    rows = [
        (tag, run.name, f"{len(series):,}", f"{series.step[0]:,}", f"{series.step[-1]:,}", f"{series.value[-1]:.6g}")
        for run in runs
        for tag, series in sorted(run.series.items())
    ]
    return table("Tags", ("tag", "run", "points", "first step", "last step", "last value"), rows)
