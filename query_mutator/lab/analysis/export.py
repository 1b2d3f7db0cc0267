"""A comparison as data: one JSON object, and one CSV row for each number with its run, tag and x."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import chain
from typing import Any, TextIO

from query_mutator.cli.outputs import marked
from query_mutator.files import finite
from query_mutator.lab.analysis.compare import Analysis, MetricResult, at_checkpoints
from query_mutator.lab.analysis.curves import Reading
from query_mutator.lab.analysis.runs import number_or_text

__all__ = ["as_csv", "as_json", "write_csv"]

_COLUMNS = ("metric", "task", "role", "group", "run", "tag", "reading", "axis", "x", "value", "divided_by")
#: A spreadsheet takes a cell that begins with one of these for a formula, and runs it.
FORMULA_SIGNS = ("=", "+", "-", "@", "\t", "\r")


def as_json(analysis: Analysis) -> str:
    """Return everything but the curves as JSON; numbers that are not finite are null."""
    data = {
        "axis": analysis.axis,
        "baseline": analysis.baseline,
        "groups": [
            {
                "name": group.name,
                "seeds": list(group.seeds),
                "runs": [
                    {
                        "name": run.name,
                        "folders": [str(folder) for folder in run.folders],
                        "last_step": run.last_step,
                        "duration_s": run.duration_s,
                    }
                    for run in group.runs
                ],
            }
            for group in analysis.groups
        ],
        "metrics": [_metric(result) for result in analysis.results],
        "settings": [{"field": name, "values": values} for name, values in analysis.settings.items()],
        "confounders": [asdict(row) for row in analysis.confounders],
        "findings": [asdict(row) for row in analysis.findings],
        "remarks": list(analysis.remarks),
    }
    return json.dumps(finite(marked(data)), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _metric(result: MetricResult) -> dict[str, Any]:
    metric = result.metric
    return {
        "name": result.name,
        "task": result.task,
        "window": result.window,
        **{name: getattr(metric, name) for name in ("role", "direction", "reducer", "unit")},
        "groups": [asdict(value) for value in result.groups],
        "comparisons": [asdict(comparison) for comparison in result.comparisons],
    }


def as_csv(analysis: Analysis, *, interval: float | None = None) -> str:
    """Return every number of the comparison and its checkpoints as CSV, one per row."""
    out = io.StringIO()
    rows = (row for result in analysis.results for row in _csv_rows(result, analysis.axis, interval))
    write_csv(out, chain([_COLUMNS], rows))
    return out.getvalue()


def _csv_rows(result: MetricResult, axis: str, interval: float | None) -> Iterator[tuple[Any, ...]]:
    about = (result.metric.name, result.task, result.metric.role)
    readings: list[tuple[str, str, Reading]] = [
        (group.group, result.metric.reducer, reading) for group in result.groups for reading in group.values
    ]
    for by_group in at_checkpoints(result, interval=interval).values():
        readings += [(group, "at", reading) for group, found in by_group.items() for reading in found]
    for group, way, read in readings:
        if math.isfinite(read.value):
            yield (*about, group, read.run, read.tag, way, axis, read.x, read.value, read.divided_by)


def write_csv(out: TextIO, rows: Iterable[Sequence[Any]]) -> None:
    """Write rows; a text that a spreadsheet would run as a formula gets an apostrophe in front, as OWASP advises."""
    csv.writer(out, lineterminator="\n").writerows([_cell(value) for value in row] for row in rows)


def _cell(value: Any) -> Any:
    is_text = isinstance(value, str) and isinstance(number_or_text(value), str)
    return f"'{value}" if is_text and value.startswith(FORMULA_SIGNS) else value
