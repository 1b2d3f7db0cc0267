"""The results of several runs in one table: `query-rewriting-table outputs/*`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NoReturn

from query_mutator.cli.console import table
from query_mutator.errors import UsageError
from query_mutator.files import parse_json_object
from query_mutator.stats.intervals import mean_interval
from query_mutator.types import success_in
from query_rewriting.record import INFO

__all__ = ["main", "row_of", "run", "traces_of"]

HEADER = ("", "rollouts", "errors", "right", "answer", "policy calls", "requests", "failed requests")


def traces_of(run: Path) -> list[dict[str, Any]]:
    """Return the traces of a run folder of vf-eval or vf-replay; UsageError for another folder."""
    try:
        lines = (run / "traces.jsonl").read_bytes().splitlines()
        return [trace for line in lines if line for trace in parse_json_object(line)["traces"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{run}: no traces of verifiers in it ({error})") from None


def row_of(name: str, traces: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """Return the row of a run: means over rollouts without an error, which are counted apart."""
    scored = [trace for trace in traces if trace["ok"]]
    info = [trace["info"].get(INFO, {}) for trace in traces]
    played_by = next((one["played_by"] for one in info if one), "?")
    metrics = [trace["metrics"] for trace in traces]
    requests = [one.get("target_requests", 0) + one.get("rewriter_requests", 0) for one in metrics]
    return (
        f"{name} ({played_by})",
        str(len(traces)),
        str(len(traces) - len(scored)),
        _percent([success_in(trace["info"][INFO]["reward"]["parts"]) for trace in scored]),
        _percent([trace["rewards"]["answer"]["score"] for trace in scored]),
        _mean([one.get("policy_calls", 0) for one in metrics]),
        _mean(requests),
        str(round(sum(one.get("failed_requests", 0) for one in metrics))),
    )


def _percent(values: Sequence[float]) -> str:
    if not values:
        return "-"
    low, high = mean_interval(values, bounds=(0.0, 1.0))
    return f"{100 * fmean(values):.1f} [{100 * low:.1f}, {100 * high:.1f}]"


def _mean(values: Sequence[float]) -> str:
    return f"{fmean(values):.2f}" if values else "-"


def main(argv: Sequence[str]) -> int:
    """Print a row for each run folder; return the exit code."""
    try:
        rows = [row_of(folder.name, traces_of(folder)) for folder in map(Path, argv)]
    except UsageError as error:
        print(f"table: {error}", file=sys.stderr)
        return error.exit_code
    print(table("right and answer in percent with 95 % intervals, calls and requests per rollout", HEADER, rows))
    return 0


def run() -> NoReturn:
    """Run the command line."""
    sys.exit(main(sys.argv[1:]))
