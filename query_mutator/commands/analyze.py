"""`qm analyze` and scripts/analyze_experiment.py: compare runs, print the report, write the files asked for."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from query_mutator.cli.console import note, run_cli
from query_mutator.cli.flags import parse_flags
from query_mutator.lab.analysis.config import AnalyzeFlags
from query_mutator.lab.analysis.job import ComparisonJob


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
    """Run the command and end the process."""
    run_cli(main, prog="analyze_experiment")
