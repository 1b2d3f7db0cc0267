"""A comparison as data: one JSON object, and one CSV row for each number with its run, tag and x."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from itertools import chain
from typing import Any

from query_mutator.cli.outputs import marked
from query_mutator.files import finite
from query_mutator.lab.analysis.csv_file import write_csv
from query_mutator.lab.analysis.curves import Reading
from query_mutator.lab.analysis.results import Analysis, MetricResult, at_checkpoints, checkpoints

__all__ = ["as_csv", "as_json"]

_COLUMNS = ("metric", "task", "role", "group", "run", "tag", "reading", "axis", "x", "value", "divided_by")


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
        "over_tasks": [asdict(row) for row in analysis.over_tasks],
        "settings": [asdict(row) for row in analysis.diff],
        "confounders": [asdict(row) for row in analysis.confounders],
        "findings": [asdict(row) for row in analysis.findings],
        "remarks": list(analysis.remarks),
    }
    return json.dumps(finite(marked(data)), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def as_csv(analysis: Analysis, *, interval: float | None = None) -> str:
    """Return every number of the comparison and its checkpoints as CSV, one per row."""
    out = io.StringIO()
    rows = (row for result in analysis.results for row in _csv_rows(result, analysis.axis, interval))
    write_csv(out, chain([_COLUMNS], rows))
    return out.getvalue()


def _metric(result: MetricResult) -> dict[str, Any]:
    return {
        "name": result.name,
        "task": result.task,
        "role": result.metric.role,
        "direction": result.metric.direction,
        "reducer": result.metric.reducer,
        "unit": result.metric.unit,
        "window": result.window,
        "groups": [asdict(value) for value in result.groups],
        "comparisons": [asdict(comparison) for comparison in result.comparisons],
    }


def _csv_rows(result: MetricResult, axis: str, interval: float | None) -> Iterator[tuple[Any, ...]]:
    about = (result.metric.name, result.task, result.metric.role)
    at = at_checkpoints(result, checkpoints(result, interval=interval, axis=axis))
    readings: list[tuple[str, str, Reading]] = [
        (group.group, way, reading)
        for group in result.groups
        for way, values in ({result.metric.reducer: group.values} | {"best_so_far": group.best}).items()
        for reading in values
    ]
    readings += [(group, "at", reading) for group, rows in at.items() for row in rows for reading in row]
    for group, way, read in readings:
        if math.isfinite(read.value):
            yield (*about, group, read.run, read.tag, way, axis, read.x, read.value, read.divided_by)
