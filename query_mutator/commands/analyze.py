"""`qm analyze` and the scripts of experiments: runs compared, and points of TensorBoard files as CSV."""

from __future__ import annotations

import fnmatch
import io
import sys
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, TextIO

from query_mutator.cli.console import note, run_cli, table
from query_mutator.cli.flags import parse_flags
from query_mutator.errors import UsageError
from query_mutator.files import atomic_write
from query_mutator.lab.analysis.config import AnalyzeFlags, ExtractFlags
from query_mutator.lab.analysis.csv_file import write_csv
from query_mutator.lab.analysis.job import ComparisonJob
from query_mutator.lab.analysis.runs import Run, find_runs, load_runs
from query_mutator.registry import nearest


def compare_runs(flags: AnalyzeFlags) -> None:
    """Read, compare, print, and write the files asked for."""
    job = ComparisonJob(flags)
    sys.stdout.write(job.as_json() if flags.json == "-" else job.as_text())
    note(*job.write())


def main(argv: Sequence[str]) -> int:
    """Compare as the command line says; return the exit code."""
    compare_runs(parse_flags(AnalyzeFlags, argv, prog="analyze_experiment.py"))
    return 0


def run() -> None:
    """Run the comparison and end the process."""
    run_cli(main, prog="analyze_experiment")


# --- scripts/extract_tensorboard_data.py: every point of chosen tags as CSV, or a list of the tags --------------------


def extract(argv: Sequence[str]) -> int:
    """Extract as the command line says; return the exit code."""
    flags = parse_flags(ExtractFlags, argv, prog="extract_tensorboard_data.py")
    runs = load_runs(find_runs(flags.runs, logdir=flags.logdir), merge_suffixed=flags.merge)
    if not flags.tag:
        print(_listing(runs))
        return 0
    _check_patterns(runs, flags.tag)
    if flags.csv is None:
        _write_points(sys.stdout, runs, flags.tag)
        return 0
    with atomic_write(flags.csv) as file:
        out = io.TextIOWrapper(file, encoding="utf-8", newline="")
        _write_points(out, runs, flags.tag)
        out.detach()  # flushes; atomic_write closes the file
    note(flags.csv)
    return 0


def run_extract() -> None:
    """Run the extraction and end the process."""
    run_cli(extract, prog="extract_tensorboard_data")


def _check_patterns(runs: Sequence[Run], patterns: Sequence[str]) -> None:
    known = sorted({tag for run in runs for tag in run.series})
    for pattern in patterns:
        if not fnmatch.filter(known, pattern):
            near = nearest(pattern, known)
            hint = f"did you mean {near!r}?" if near else "leave --tag out to list the tags"
            raise UsageError(f"no run has a tag {pattern!r}; {hint}")


def _write_points(out: TextIO, runs: Sequence[Run], patterns: Sequence[str]) -> None:
    write_csv(out, chain([("run", "tag", "step", "time_s", "value")], _points(runs, patterns)))


def _points(runs: Sequence[Run], patterns: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    for found in runs:
        for tag, series in found.series.items():
            if any(fnmatch.fnmatchcase(tag, pattern) for pattern in patterns):
                columns = series.step.tolist(), series.wall.tolist(), series.value.tolist()
                yield from ((found.name, tag, *row) for row in zip(*columns, strict=True))


def _listing(runs: Sequence[Run]) -> str:
    rows = [
        (tag, run.name, f"{len(series):,}", f"{series.step[0]:,}", f"{series.step[-1]:,}", f"{series.value[-1]:.6g}")
        for run in runs
        for tag, series in sorted(run.series.items())
    ]
    return table("Tags", ("tag", "run", "points", "first step", "last step", "last value"), rows)
