"""The tables and sentences of a report, each made of an Analysis."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from query_mutator.lab.analysis.curves import Reading, reduced
from query_mutator.lab.analysis.document import Block, Bullets, Cell, Row, Table
from query_mutator.lab.analysis.results import (
    Analysis,
    Comparison,
    GroupValue,
    MetricResult,
    at_checkpoints,
    checkpoints,
)
from query_mutator.lab.analysis.wording import at, clock, interval, number, percent, place, reading_name, trace_of

__all__ = [
    "by_checkpoint", "comparison_tables", "differences", "other_metrics", "overview", "remarks", "sentences", "sources",
    "tasks_table",
]  # fmt: skip

_VERBS = {"better": "is better than", "worse": "is worse than", "equivalent": "is equivalent to"}
_BETTER = {"up": "more is better", "down": "less is better", "-": ""}


def overview(analysis: Analysis) -> Table:
    """Return a row for each run."""
    rows: list[Row] = []
    for group in analysis.groups:
        for run, seed in zip(group.runs, group.seeds, strict=True):
            points = sum(map(len, run.series.values()))
            folders = " + ".join(folder.name for folder in run.folders[1:])
            name = f"{run.name} (+ {folders})" if folders else run.name
            shown_seed = "" if seed is None else str(seed)
            rows.append((name, group.name, shown_seed, f"{run.last_step:,}", clock(run.duration_s), f"{points:,}"))
    return Table(title="Runs", header=("run", "group", "seed", "last step", "duration", "points"), rows=rows)


def sentences(result: MetricResult) -> list[str]:
    """Return the verdicts on a metric in words, with the numbers behind them."""
    counts = {value.group: len(value.numbers) for value in result.groups}
    lines = []
    for c in result.comparisons:
        change = _change(c)
        if math.isfinite(c.interval[0]):
            change += f", 95 % interval {interval(c.interval, signed=True)}"
        verb, inconclusive = _VERBS.get(c.verdict, "against"), "inconclusive: " if c.verdict == "inconclusive" else ""
        n = f"n = {counts[c.group]} against {counts[c.baseline]}"
        lines.append(f"{result.name}: {c.group} {verb} {c.baseline}: {change}, {n}; {inconclusive}{c.why}")
    return lines


def comparison_tables(result: MetricResult, analysis: Analysis) -> tuple[Table, Table]:
    """Return a metric's row for each group (value, difference, tests, verdict), and its other readings."""
    compared = {comparison.group: comparison for comparison in result.comparisons}
    reading = reading_name(result.metric, result.metric.reducer)
    header = ("group", "n", f"{reading} [95 %]", "difference [95 %]", "permutation p (least possible)",
              "p (Holm)", "margin", "detectable", "verdict")  # fmt: skip
    unit = f" in {result.metric.unit}" if result.metric.unit else ""
    window = f"up to {at(result.window[1], analysis.axis)} {analysis.unit}"
    title = f"{result.name}{unit}; {_BETTER[result.metric.direction]}; {window}; baseline {analysis.baseline}"
    rows = [(*_value_cells(value), *_comparison_cells(compared.get(value.group))) for value in result.groups]
    return Table(title=title, header=header, rows=rows), _readings_table(result)


def tasks_table(analysis: Analysis) -> list[Block]:
    """Return the aggregates over several tasks of a metric, where there are any."""
    rows = [
        (
            row.metric,
            row.group,
            f"{number(row.interquartile_mean)} {interval(row.interval)}",
            "" if row.improvement is None else f"{row.improvement:.2f}",
        )
        for row in analysis.over_tasks
    ]
    header = ("metric", "group", "interquartile mean [95 %]", "probability of improvement")
    return [Table(title=f"All tasks together, against {analysis.baseline}", header=header, rows=rows)] if rows else []


def other_metrics(analysis: Analysis) -> list[Block]:
    """Return one table for each role that does not decide."""
    header = ("metric", "group", "n", "value [95 %]", "against baseline", "verdict")
    tables: list[Block] = []
    for role in ("throughput", "stability", "diagnostic"):
        rows = [row for result in analysis.of_role(role) for row in _metric_rows(result)]
        if rows:
            title = f"{role.capitalize()} (baseline: {analysis.baseline})"
            tables.append(Table(title=title, header=header, rows=rows))
    return tables


def by_checkpoint(analysis: Analysis, every: float | None) -> list[Block]:
    """Return, for each performance metric, its values at checkpoints of the common window."""
    tables: list[Block] = []
    for result in analysis.of_role("performance") or analysis.results[:1]:
        xs = checkpoints(result, interval=every, axis=analysis.axis)
        readings = at_checkpoints(result, xs)
        rows = [
            (at(x, analysis.axis), *(_mean_cell(of_group[row]) for of_group in readings.values()))
            for row, x in enumerate(xs)
        ]
        best = "best so far" if result.metric.reducer == "best_so_far" else "linear between points"
        title = f"{result.name}: mean over seeds ({best}), common window only"
        if rows:
            tables.append(Table(title=title, header=(analysis.unit, *readings), rows=rows))
    return tables


def differences(analysis: Analysis) -> list[Block]:
    """Return the settings that differ, and what else moved with them."""
    names = [group.name for group in analysis.groups]
    blocks: list[Block] = []
    if analysis.diff:
        settings = [(row.field, *row.values) for row in analysis.diff]
        blocks.append(Table(title="Settings", header=("setting", *names), rows=settings))
    if analysis.confounders:
        rows = [
            (row.name, *("" if value is None else number(value) for value in row.values), "moved" if row.moved else "")
            for row in analysis.confounders
        ]
        blocks.append(Table(title="Confounders: what else moved", header=("figure", *names, ""), rows=rows))
        moved = [row.name for row in analysis.confounders if row.moved]
        if moved and len(names) > 1:
            blocks.append(
                f"The settings above were not changed alone: {' and '.join(moved)} moved with them. So a difference "
                "between the groups cannot be attributed to any one of them."
            )
    return blocks


def remarks(analysis: Analysis) -> list[Block]:
    """Return what the watch rules found, and remarks on the comparison."""
    blocks: list[Block] = []
    if analysis.findings:
        rows = [
            (
                found.run,
                found.metric,
                found.rule,
                Cell(number(found.value), f"{found.run} {found.tag} x={place(found.x)}"),
                found.says,
            )
            for found in analysis.findings
        ]
        blocks.append(Table(title="Watch rules", header=("run", "metric", "rule", "value", "what"), rows=rows))
    return [*blocks, Bullets(items=analysis.remarks)] if analysis.remarks else blocks


def sources(analysis: Analysis) -> Table:
    """Return run, tag and x of every number of the comparison."""
    rows = [
        (result.name, read.run, read.tag, at(read.x, analysis.axis), number(read.value), read.divided_by)
        for result in analysis.results
        for group in result.groups
        for read in group.values
    ]
    header = ("metric", "run", "tag", analysis.unit, "value", "divided by")
    return Table(title="One row for each run and metric", header=header, rows=rows)


# --- one metric -------------------------------------------------------------------------------------------------------


def _readings_table(result: MetricResult) -> Table:
    """Return the same curves read in other ways: last, best so far, mean of the last k, area, first to a threshold."""
    ways = ["last", "best_so_far", "mean_last_k", "auc"]
    if result.metric.threshold is not None:
        ways.append("time_to_threshold")
    rows = []
    for value in result.groups:
        curves = [curve.until(result.window[1]) for name, curve in result.curves if name == value.group]
        cells = [_mean_cell([reduced(curve, result.metric, reducer=way) for curve in curves]) for way in ways]
        rows.append((value.group, *cells))
    title = f"{result.name}: other readings of the same curves, mean over seeds"
    return Table(title=title, header=("group", *(reading_name(result.metric, way) for way in ways)), rows=rows)


def _metric_rows(result: MetricResult) -> list[Row]:
    compared = {comparison.group: comparison for comparison in result.comparisons}
    unit = f" ({result.metric.unit})" if result.metric.unit else ""
    divisors = {read.divided_by.split()[0] for value in result.groups for read in value.values if read.divided_by}
    name = result.name + unit + "".join(f" / {divisor}" for divisor in sorted(divisors))
    rows: list[Row] = []
    for value in result.groups:
        comparison = compared.get(value.group)
        verdict = (_change(comparison), comparison.verdict) if comparison else ("", "")
        rows.append((name, *_value_cells(value), *verdict))
    return rows


def _value_cells(value: GroupValue) -> Row:
    text = f"{number(value.mean)} {interval(value.interval)}".strip()
    return value.group, str(len(value.numbers)), Cell(text, "; ".join(map(trace_of, value.values)))


def _comparison_cells(comparison: Comparison | None) -> Row:
    if comparison is None:
        return ("", "", "", "", "", "baseline")
    permutation = comparison.permutation
    p = f"{permutation.p:.3g} ({permutation.smallest:.2g})" if permutation else "none (one seed)"
    change = f"{_change(comparison)} {interval(comparison.interval, signed=True)}"
    margin = "none stated" if comparison.margin is None else number(comparison.margin)
    detectable = number(comparison.detectable) if math.isfinite(comparison.detectable) else ""
    return (change.strip(), p, f"{comparison.p:.3g}" if permutation else "", margin, detectable, comparison.verdict)


def _change(comparison: Comparison) -> str:
    return f"{number(comparison.difference, signed=True)}{percent(comparison)}"


def _mean_cell(readings: Sequence[Reading]) -> str | Cell:
    known = [reading.value for reading in readings if math.isfinite(reading.value)]
    if not known:
        return "-"
    missing = f" ({len(known)} of {len(readings)})" if len(known) < len(readings) else ""
    return Cell(number(float(np.mean(known))) + missing, "; ".join(map(trace_of, readings)))
