"""The standard report of a comparison: verdicts first, then every number they rest on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from query_mutator.analysis.compare import (
    Analysis,
    Comparison,
    GroupValue,
    MetricResult,
    at_checkpoints,
    checkpoints,
)
from query_mutator.analysis.curves import Reading, reduced
from query_mutator.analysis.document import Block, Bullets, Cell, Document, Figure, Section, Table
from query_mutator.analysis.wording import at, clock, interval, number, percent, place, reading_name, trace_of

DECIDES = "Only performance metrics decide which group is better; the others say what else is different."


def report(
    by_step: Analysis, by_time: Analysis | None = None, *, step_interval: float | None, interval_s: float | None
) -> Document:
    """Return the report; the second analysis, against time, gives the tables by time."""
    sections = [
        Section(title="Comparison of runs", level=0, blocks=(overview(by_step),)),
        Section(title="Verdicts", blocks=verdicts(by_step)),
        Section(title="Other metrics", blocks=(DECIDES, *other_metrics(by_step))),
        Section(title=f"By {by_step.axis}", blocks=by_checkpoint(by_step, step_interval)),
    ]
    if by_time is not None:
        sections.append(Section(title="By time", blocks=by_checkpoint(by_time, interval_s)))
    sections += [
        Section(title="What is different between the groups", blocks=differences(by_step)),
        Section(title="What deserves a second look", blocks=second_looks(by_step)),
        Section(title="Where the numbers come from", blocks=(sources(by_step),)),
    ]
    return Document(sections=tuple(section for section in sections if section.blocks))


# --- parts ------------------------------------------------------------------------------------------------------------


def overview(analysis: Analysis) -> Table:
    """Return a row for each run."""
    rows = []
    for group in analysis.groups:
        for run, seed in zip(group.runs, group.seeds, strict=True):
            points = sum(map(len, run.series.values()))
            folders = " + ".join(folder.name for folder in run.folders[1:])
            name = f"{run.name} (+ {folders})" if folders else run.name
            rows.append(
                (
                    name,
                    group.name,
                    "" if seed is None else str(seed),
                    f"{run.last_step:,}",
                    clock(run.duration_s),
                    f"{points:,}",
                )
            )
    return Table(title="Runs", header=("run", "group", "seed", "last step", "duration", "points"), rows=tuple(rows))


def verdicts(analysis: Analysis) -> tuple[Block, ...]:
    """Return a sentence and a table for each performance metric."""
    blocks: list[Block] = []
    for result in analysis.of_role("performance"):
        blocks += [Bullets(items=tuple(sentence(result, comparison) for comparison in result.comparisons))]
        blocks += [comparison_table(result, analysis), readings_table(result)]
    if analysis.over_tasks:
        rows = tuple(
            (
                row.metric,
                row.group,
                f"{number(row.interquartile_mean)} {interval(row.interval)}",
                "" if row.improvement is None else f"{row.improvement:.2f}",
            )
            for row in analysis.over_tasks
        )
        header = ("metric", "group", "interquartile mean [95 %]", "probability of improvement")
        blocks.append(Table(title=f"All tasks together, against {analysis.baseline}", header=header, rows=rows))
    return tuple(block for block in blocks if not isinstance(block, Bullets) or block.items)


def other_metrics(analysis: Analysis) -> tuple[Block, ...]:
    """Return one table of all metrics that decide nothing."""
    blocks: list[Block] = []
    for role in ("throughput", "stability", "diagnostic"):
        results = analysis.of_role(role)
        if results:
            rows = tuple(row for result in results for row in _metric_rows(result))
            header = ("metric", "group", "n", "value [95 %]", "against baseline", "verdict")
            blocks.append(Table(title=f"{role.capitalize()} (baseline: {analysis.baseline})", header=header, rows=rows))
    return tuple(blocks)


def by_checkpoint(analysis: Analysis, every: float | None) -> tuple[Block, ...]:
    """Return, for each performance metric, its values at checkpoints of the common window."""
    blocks = []
    for result in analysis.of_role("performance") or analysis.results[:1]:
        xs = checkpoints(result, interval=every, axis=analysis.axis)
        readings = at_checkpoints(result, xs)
        rows = tuple(
            (at(x, analysis.axis), *(_mean_cell(readings[name][row], result, name) for name in readings))
            for row, x in enumerate(xs)
        )
        best = "best so far" if result.metric.reducer == "best_so_far" else "linear between points"
        title = f"{result.name}: mean over seeds ({best}), common window only"
        if rows:
            blocks.append(Table(title=title, header=(analysis.unit, *readings), rows=rows))
    return tuple(blocks)


def differences(analysis: Analysis) -> tuple[Block, ...]:
    """Return the settings that differ, and what else moved with them."""
    names = tuple(group.name for group in analysis.groups)
    blocks: list[Block] = []
    if analysis.diff:
        rows = tuple((row.field, *row.values) for row in analysis.diff)
        blocks.append(Table(title="Settings", header=("setting", *names), rows=rows))
    if analysis.confounders:
        rows = tuple(
            (row.name, *("" if value is None else number(value) for value in row.values), "moved" if row.moved else "")
            for row in analysis.confounders
        )
        blocks.append(Table(title="Confounders: what else moved", header=("figure", *names, ""), rows=rows))
        moved = [row.name for row in analysis.confounders if row.moved]
        if moved and len(names) > 1:
            blocks.append(
                f"What differs was not changed alone: {' and '.join(moved)} moved with it. So a difference between the "
                "groups cannot be put down to any one of them."
            )
    return tuple(blocks)


def second_looks(analysis: Analysis) -> tuple[Block, ...]:
    """Return what the watch rules found, and remarks."""
    blocks: list[Block] = []
    if analysis.findings:
        rows = tuple(
            (
                found.run,
                found.metric,
                found.rule,
                Cell(number(found.value), f"{found.run} {found.tag} x={place(found.x)}"),
                found.says,
            )
            for found in analysis.findings
        )
        blocks.append(Table(title="Watch rules", header=("run", "metric", "rule", "value", "what"), rows=rows))
    if analysis.remarks:
        blocks.append(Bullets(items=analysis.remarks))
    return tuple(blocks)


def sources(analysis: Analysis) -> Table:
    """Return run, tag and x of every number of the comparison."""
    rows = tuple(
        (result.name, traced.run, traced.tag, at(traced.x, analysis.axis), number(traced.value), traced.divided_by)
        for result in analysis.results
        for group in result.groups
        for traced in group.values
    )
    header = ("metric", "run", "tag", analysis.unit, "value", "divided by")
    return Table(title="One row for each run and metric", header=header, rows=rows)


# --- one metric -------------------------------------------------------------------------------------------------------


def sentence(result: MetricResult, comparison: Comparison) -> str:
    """Return the verdict in words, with what it rests on."""
    by_name = {value.group: value for value in result.groups}
    n, m = len(by_name[comparison.group].numbers), len(by_name[comparison.baseline].numbers)
    change = f"{number(comparison.difference, signed=True)}{percent(comparison)}"
    if math.isfinite(comparison.interval[0]):
        change += f", 95 % interval {interval(comparison.interval, signed=True)}"
    verb = {"better": "is better than", "worse": "is worse than", "equivalent": "is equivalent to"}.get(
        comparison.verdict, "against"
    )
    ending = f"; inconclusive: {comparison.why}" if comparison.verdict == "inconclusive" else f"; {comparison.why}"
    return f"{result.name}: {comparison.group} {verb} {comparison.baseline}: {change}, n = {n} against {m}{ending}"


def comparison_table(result: MetricResult, analysis: Analysis) -> Table:
    """Return a metric's row for each group: value, difference, tests, verdict."""
    compared = {comparison.group: comparison for comparison in result.comparisons}
    rows = tuple((*_value_cells(value), *_comparison_cells(compared.get(value.group))) for value in result.groups)
    reading = reading_name(result.metric, result.metric.reducer)
    header = ("group", "n", f"{reading} [95 %]", "difference [95 %]", "permutation p (least possible)",
              "p (Holm)", "margin", "detectable", "verdict")  # fmt: skip
    unit = f" in {result.metric.unit}" if result.metric.unit else ""
    better = {"up": "more is better", "down": "less is better", "-": ""}[result.metric.direction]
    window = f"up to {at(result.window[1], analysis.axis)} {analysis.unit}"
    return Table(
        title=f"{result.name}{unit}; {better}; {window}; baseline {analysis.baseline}", header=header, rows=rows
    )


def readings_table(result: MetricResult) -> Table:
    """Return the same curves read in other ways: last, best so far, mean of the last k, area, first to a threshold."""
    metric = result.metric
    ways = ["last", "best_so_far", "mean_last_k", "auc"] + (
        ["time_to_threshold"] if metric.threshold is not None else []
    )
    rows = []
    for value in result.groups:
        curves = [curve.until(result.window[1]) for name, curve in result.curves if name == value.group]
        cells = []
        for way in ways:
            found = [reduced(curve, metric, reducer=way) for curve in curves]
            cells.append(_readings_cell(found, [f"{curve.run} {curve.tag}" for curve in curves]))
        rows.append((value.group, *cells))
    return Table(
        title=f"{result.name}: other readings of the same curves, mean over seeds",
        header=("group", *(reading_name(metric, way) for way in ways)),
        rows=tuple(rows),
    )


def _metric_rows(result: MetricResult) -> list[tuple[str | Cell, ...]]:
    compared = {comparison.group: comparison for comparison in result.comparisons}
    unit = f" ({result.metric.unit})" if result.metric.unit else ""
    divisors = {traced.divided_by.split()[0] for value in result.groups for traced in value.values if traced.divided_by}
    unit += "".join(f" / {divisor}" for divisor in sorted(divisors))
    rows: list[tuple[str | Cell, ...]] = []
    for value in result.groups:
        comparison = compared.get(value.group)
        change = f"{number(comparison.difference, signed=True)}{percent(comparison)}" if comparison else ""
        verdict = comparison.verdict if comparison else ""
        rows.append((f"{result.name}{unit}", *_value_cells(value), change, verdict))
    return rows


def _value_cells(value: GroupValue) -> tuple[str | Cell, ...]:
    trace = "; ".join(trace_of(traced) for traced in value.values)
    text = f"{number(value.mean)} {interval(value.interval)}".strip()
    return value.group, str(len(value.numbers)), Cell(text, trace)


def _comparison_cells(comparison: Comparison | None) -> tuple[str, ...]:
    if comparison is None:
        return ("", "", "", "", "", "baseline")
    permutation = comparison.permutation
    p = f"{permutation.p:.3g} ({permutation.smallest:.2g})" if permutation else "none (one seed)"
    bounds = interval(comparison.interval, signed=True)
    change = f"{number(comparison.difference, signed=True)}{percent(comparison)} {bounds}"
    margin = "none stated" if comparison.margin is None else number(comparison.margin)
    detectable = number(comparison.detectable) if math.isfinite(comparison.detectable) else ""
    return (change.strip(), p, f"{comparison.p:.3g}" if permutation else "", margin, detectable, comparison.verdict)


def _mean_cell(readings: Sequence[Reading], result: MetricResult, group: str) -> str | Cell:
    runs = [f"{curve.run} {curve.tag}" for name, curve in result.curves if name == group]
    return _readings_cell(readings, runs)


def _readings_cell(readings: Sequence[Reading], runs: Sequence[str]) -> str | Cell:
    known = [reading.value for reading in readings if math.isfinite(reading.value)]
    if not known:
        return "-"
    trace = "; ".join(f"{run} x={place(reading.x)}" for run, reading in zip(runs, readings, strict=True))
    missing = f" ({len(known)} of {len(readings)})" if len(known) < len(readings) else ""
    return Cell(number(float(np.mean(known))) + missing, trace)


def with_figure(document: Document, file: str, *, svg: str = "") -> Document:
    """Return the report with the curves behind its verdicts, replacing an earlier figure."""
    figure = Figure(caption="Mean over runs with its 95 % interval; thin lines are single runs.", file=file, svg=svg)
    place = next((n for n, section in enumerate(document.sections) if section.title in ("Verdicts", "Results")), 0)
    sections = list(document.sections)
    kept = tuple(block for block in sections[place].blocks if not isinstance(block, Figure))
    sections[place] = replace(sections[place], blocks=(*kept, figure))
    return Document(sections=tuple(sections))
