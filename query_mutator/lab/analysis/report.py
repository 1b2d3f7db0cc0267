"""A comparison for people and programs: a page with curves, one JSON object, one CSV row per number with its source.

The page's sentences are templates that the program fills with numbers; where a cause takes a person's judgment, the
page says so. `render` writes it as text, Markdown, reStructuredText or HTML, with a template for each.
"""

from __future__ import annotations

import csv
import functools
import io
import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from datetime import timedelta
from itertools import chain, cycle
from pathlib import Path
from typing import Any, Literal, NamedTuple, TextIO

import numpy as np
from jinja2 import Environment, FileSystemLoader

from query_mutator.cli.console import table
from query_mutator.cli.outputs import marked
from query_mutator.files import finite, html_document
from query_mutator.lab.analysis.compare import Analysis, Comparison, MetricResult, at_checkpoints
from query_mutator.lab.analysis.curves import Curve, Reading
from query_mutator.lab.analysis.events import Floats
from query_mutator.lab.analysis.runs import number_or_text
from query_mutator.lab.analysis.spec import MetricSpec
from query_mutator.stats import Interval, student_t

__all__ = [
    "Figure", "Section", "as_csv", "as_json", "draw_curves", "interval", "number", "page", "reading_name", "render",
    "write_csv",
]  # fmt: skip

Format = Literal["text", "markdown", "rst", "html"]

_VERBS = {"better": "is better than", "worse": "is worse than", "equivalent": "is equivalent to"}
_BETTER = {"up": "more is better", "down": "less is better", "-": ""}
_DECIDES = "Only performance metrics decide which group is better; the others say what else is different."


class Cell(NamedTuple):
    """A cell of a table, and run, tag and x of its number."""

    text: str
    trace: str = ""

    def __str__(self) -> str:
        return self.text


Row = tuple[str | Cell, ...]


class Table(NamedTuple):
    """Rows under a header; the first column names the row."""

    title: str
    header: Sequence[str]
    rows: Sequence[Row]


class Figure(NamedTuple):
    """The curves: SVG source, or the name of their file."""

    file: str = ""
    svg: str = ""
    caption: str = "Mean over runs with its 95 % interval; thin lines are single runs."


class Code(str):
    """A block of shell commands."""


Block = str | list[str] | Table | Figure | Code  # a list is one of remarks


class Section(NamedTuple):
    """A title and the blocks under it; `level` 0 is the title of the page."""

    title: str
    blocks: Sequence[Block]
    level: int = 1


def page(
    analysis: Analysis, *, title: str, command: str, every: float | None = None, figure: Figure | None = None
) -> list[Section]:
    """Return the sections that have content; tables by the axis have a row for `every` so much of it."""
    performance = analysis.of_role("performance")
    findings = [line for result in performance for line in _sentences(result)]
    sections = [
        Section(title, [_overview(analysis)], level=0),
        Section("Results", [findings or ["Nothing was compared, so there is no finding."], *filter(None, [figure])]),
        Section("Run Analysis", [_runs_table(analysis), "To reproduce these numbers:", Code(command)]),
        Section("Detailed Metrics Analysis", [_decisive_table(result, analysis) for result in performance]),
        Section(f"By {analysis.axis}", [*_by_checkpoint(analysis, every)]),
        Section("Other metrics", [_DECIDES, *_other_tables(analysis)]),
        Section("Warnings", [*_warnings(analysis)]),
        Section("Configuration Changes", [*_differences(analysis)] or ["These runs have no recorded settings."]),
        Section("Hardware", [*_hardware(analysis)]),
    ]
    return [section for section in sections if section.blocks]


def render(sections: Sequence[Section], format: Format) -> str:
    """Return the page as text, Markdown, reStructuredText or HTML."""
    text = _environment(format == "html").get_template(f"page_{format}.txt").render(sections=sections)
    if format == "html":
        style = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
        return html_document(title=sections[0].title, style=style.strip(), body=text.strip())
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


@functools.cache
def _environment(is_html: bool) -> Environment:
    found = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=is_html, trim_blocks=True, lstrip_blocks=True
    )
    found.filters["kind"] = lambda block: type(block).__name__
    found.filters["table"] = lambda block: table(block.title, block.header, [[*map(str, row)] for row in block.rows])
    found.filters["escaped"] = lambda text: re.sub(r"([\\*`|_])", r"\\\1", str(text))
    found.filters["element"] = lambda svg: re.sub(r"^.*?(?=<svg)", "", svg, flags=re.DOTALL)  # without its declarations
    return found


# --- words ------------------------------------------------------------------------------------------------------------


def number(value: float, *, signed: bool = False) -> str:
    """Return a number with four significant digits."""
    if math.isnan(value):
        return "-"
    if value and abs(value) >= 1e4:
        return f"{value:+,.0f}" if signed else f"{value:,.0f}"
    return f"{value:+.4g}" if signed else f"{value:.4g}"


def interval(bounds: Interval, *, signed: bool = False) -> str:
    """Return an interval as [low, high]; "" for the whole line."""
    if not all(map(math.isfinite, bounds)):
        return ""
    return f"[{number(bounds[0], signed=signed)}, {number(bounds[1], signed=signed)}]"


def reading_name(metric: MetricSpec) -> str:
    """Return the reducer of a metric in words."""
    names = {
        "mean_last_k": f"mean of last {metric.k}",
        "best_so_far": "best so far",
        "auc": "area under curve / width",
        "time_to_threshold": f"first x at {metric.threshold}",
    }
    return names.get(metric.reducer, metric.reducer)


def _clock(seconds: float) -> str:
    """Return a time as h:mm:ss, "-" for one that is not known."""
    return str(timedelta(seconds=round(seconds))) if math.isfinite(seconds) else "-"


def _at(x: float, axis: str) -> str:
    """Return a place on an axis as text."""
    if axis == "time" and math.isfinite(x):
        return _clock(x)
    return f"{x:,.0f}" if math.isfinite(x) and abs(x) >= 100 else number(x)


def _trace_of(reading: Reading) -> str:
    """Return run, tag and x of a number, with all digits of x, so that the point can be found."""
    divided = f", divided by {reading.divided_by}" if reading.divided_by else ""
    return f"{reading.run} {reading.tag} x={reading.x:.12g}{divided}"


def _change(comparison: Comparison) -> str:
    share = f" ({100 * comparison.share:+.1f} %)" if math.isfinite(comparison.share) else ""
    return f"{number(comparison.difference, signed=True)}{share}"


# --- results ----------------------------------------------------------------------------------------------------------


def _overview(analysis: Analysis) -> str:
    changed = ", ".join(analysis.settings) or "none of the recorded settings"
    seeds = ", ".join(f"{group.name}: {group.num_seeds}" for group in analysis.groups)
    return (
        f"Experiment Overview: {len(analysis.runs)} runs in {len(analysis.groups)} groups. What was changed between "
        f"them: {changed}. Baseline: {analysis.baseline}. Seeds by group: {seeds}."
    )


def _runs_table(analysis: Analysis) -> Table:
    rows: list[Row] = []
    for group in analysis.groups:
        for run, seed in zip(group.runs, group.seeds, strict=True):
            points = sum(map(len, run.series.values()))
            folders = " + ".join(folder.name for folder in run.folders[1:])
            name = f"{run.name} (+ {folders})" if folders else run.name
            shown_seed = "" if seed is None else str(seed)
            rows.append((name, group.name, shown_seed, f"{run.last_step:,}", _clock(run.duration_s), f"{points:,}"))
    return Table(title="Runs", header=("run", "group", "seed", "last step", "duration", "points"), rows=rows)


def _sentences(result: MetricResult) -> Iterator[str]:
    """Yield the verdicts on a metric in words, with the numbers behind them."""
    counts = {value.group: len(value.numbers) for value in result.groups}
    for c in result.comparisons:
        change = _change(c)
        if math.isfinite(c.interval[0]):
            change += f", 95 % interval {interval(c.interval, signed=True)}"
        verb, inconclusive = _VERBS.get(c.verdict, "against"), "inconclusive: " if c.verdict == "inconclusive" else ""
        n = f"n = {counts[c.group]} against {counts[c.baseline]}"
        yield f"{result.name}: {c.group} {verb} {c.baseline}: {change}, {n}; {inconclusive}{c.why}"


def _decisive_table(result: MetricResult, analysis: Analysis) -> Table:
    """Return the values, differences and tests of a performance metric."""
    in_unit = analysis.unit if result.metric.reducer == "time_to_threshold" else result.metric.unit
    about = [
        f"{result.name}{in_unit and f' in {in_unit}'}, {reading_name(result.metric)}",
        _BETTER[result.metric.direction],
        f"up to {_at(result.window[1], analysis.axis)} {analysis.unit}",
        f"baseline {analysis.baseline}",
    ]
    return _metrics_table("; ".join(about), [result], tests=("p (Holm)", "margin", "detectable"))


def _other_tables(analysis: Analysis) -> Iterator[Table]:
    """Yield one table for each role that does not decide."""
    for role in ("throughput", "stability", "diagnostic"):
        if results := analysis.of_role(role):
            yield _metrics_table(f"{role.capitalize()} (baseline: {analysis.baseline})", results)


def _metrics_table(title: str, results: Sequence[MetricResult], *, tests: Sequence[str] = ()) -> Table:
    """Return a row for each metric and group, with the columns of `tests` if they count."""
    rows: list[Row] = []
    for result in results:
        compared = {comparison.group: comparison for comparison in result.comparisons}
        divisors = {r.divided_by.split()[0] for value in result.groups for r in value.values if r.divided_by}
        unit = f" ({result.metric.unit})" if result.metric.unit else ""
        name = " / ".join([result.name + unit, *sorted(divisors)])
        for value in result.groups:
            text = f"{number(value.mean)} {interval(value.interval)}".strip()
            cells = _comparison_cells(compared.get(value.group))
            shown = cells if tests else (cells[0], cells[-1])
            trace = "; ".join(map(_trace_of, value.values))
            rows.append((name, value.group, str(len(value.numbers)), Cell(text, trace), *shown))
    header = ("metric", "group", "n", "value [95 %]", "difference [95 %]", *tests, "verdict")
    return Table(title=title, header=header, rows=rows)


def _comparison_cells(comparison: Comparison | None) -> tuple[str, ...]:
    if comparison is None:
        return ("", "", "", "", "baseline")
    change = f"{_change(comparison)} {interval(comparison.interval, signed=True)}".strip()
    margin = "none stated" if comparison.margin is None else number(comparison.margin)
    detectable = number(comparison.detectable) if math.isfinite(comparison.detectable) else ""
    return (change, f"{comparison.p:.3g}", margin, detectable, comparison.verdict)


def _by_checkpoint(analysis: Analysis, every: float | None) -> Iterator[Table]:
    """Yield, for each performance metric, its values at checkpoints of the common window."""
    for result in analysis.of_role("performance") or analysis.results[:1]:
        found = at_checkpoints(result, interval=every)
        rows = [(_at(x, analysis.axis), *map(_mean_cell, by_group.values())) for x, by_group in found.items()]
        best = "best so far" if result.metric.reducer == "best_so_far" else "linear between points"
        title = f"{result.name}: mean over seeds ({best}), common window only"
        if rows:
            yield Table(title=title, header=(analysis.unit, *(value.group for value in result.groups)), rows=rows)


def _mean_cell(readings: Sequence[Reading]) -> str | Cell:
    known = [reading.value for reading in readings if math.isfinite(reading.value)]
    if not known:
        return "-"
    missing = f" ({len(known)} of {len(readings)})" if len(known) < len(readings) else ""
    return Cell(number(float(np.mean(known))) + missing, "; ".join(map(_trace_of, readings)))


# --- what else differs, and what follows ------------------------------------------------------------------------------


def _differences(analysis: Analysis) -> Iterator[Block]:
    """Yield the settings that differ, and what else moved with them."""
    names = [group.name for group in analysis.groups]
    if analysis.settings:
        settings = [(name, *values) for name, values in analysis.settings.items()]
        yield Table(title="Settings", header=("setting", *names), rows=settings)
    if analysis.confounders:
        rows = [
            (row.name, *("" if value is None else number(value) for value in row.values), "moved" if row.moved else "")
            for row in analysis.confounders
        ]
        yield Table(title="Confounders: what else moved", header=("figure", *names, ""), rows=rows)
    moved = [row.name for row in analysis.confounders if row.moved]
    if moved and len(names) > 1:
        yield (
            f"The settings above were not changed alone: {' and '.join(moved)} moved with them. So a difference "
            "between the groups cannot be attributed to any one of them."
        )


def _warnings(analysis: Analysis) -> Iterator[Block]:
    """Yield what the watch rules found, and remarks on the comparison."""
    rows = [
        (f.run, f.metric, f.rule, Cell(number(f.value), f"{f.run} {f.tag} x={f.x:.12g}"), f.says)
        for f in analysis.findings
    ]
    if rows:
        yield Table(title="Watch rules", header=("run", "metric", "rule", "value", "what"), rows=rows)
    if analysis.remarks:
        yield [*analysis.remarks]


def _hardware(analysis: Analysis) -> Iterator[Block]:
    known = [run.hardware for run in analysis.runs if run.hardware]
    if not known:
        yield "The runs did not record their hardware; compare throughput on equal hardware only."
        return
    names = dict.fromkeys(name for hardware in known for name in hardware)
    values = {name: list(dict.fromkeys(str(hardware.get(name, "")) for hardware in known)) for name in names}
    same = all(len(of_name) == 1 for of_name in values.values()) and len(known) == len(analysis.runs)
    yield Table(title="Hardware", header=("", "value"), rows=[(name, " | ".join(v)) for name, v in values.items()])
    yield "The same for all runs." if same else "Different or unknown between runs: throughput is not comparable."


# --- data -------------------------------------------------------------------------------------------------------------

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


# --- curves: the mean of each group with its 95 % band, single runs thin behind it; matplotlib without pyplot ---------

_COLORS = ("#1b4965", "#c1666b", "#d4a017", "#2a9d8f", "#7d5ba6", "#6c757d", "#e07a5f", "#457b9d", "#81b29a", "#b5838d")
_POINTS = 200  # of a mean curve
_DRAWN = 2000  # points of one run that are drawn at most


def draw_curves(results: Sequence[MetricResult], *, unit: str, format: str) -> bytes:
    """Return a picture, png or svg, with a panel for each metric."""
    import matplotlib.figure

    matplotlib.rcParams["svg.hashsalt"] = "query-mutator"  # the same curves give the same file
    figure = matplotlib.figure.Figure(figsize=(8, 4.2 * len(results)), dpi=120, layout="constrained")
    for axes, result in zip(figure.subplots(len(results), squeeze=False)[:, 0], results, strict=True):
        _panel(axes, result, unit)
    out = io.BytesIO()
    figure.savefig(out, format=format, metadata={"Date": None} if format == "svg" else None)
    return out.getvalue()


def _panel(axes: Any, result: MetricResult, unit: str) -> None:
    best = ", best so far" if result.metric.reducer == "best_so_far" else ""
    for color, group in zip(cycle(_COLORS), result.groups, strict=False):
        curves = [curve.finite() for name, curve in result.curves if name == group.group]
        curves = [curve.best_so_far(result.metric.direction) if best else curve for curve in curves if len(curve)]
        for curve in curves:
            stride = len(curve) // _DRAWN + 1
            axes.plot(curve.x[::stride], curve.y[::stride], color=color, alpha=0.3, linewidth=0.8)
        if curves:
            x, mean, half = _mean_and_band(curves)
            runs = f"{len(curves)} run" + ("s" if len(curves) > 1 else "")
            axes.plot(x, mean, color=color, label=f"{group.group} ({runs})")
            low, high = result.metric.bounds
            band = (np.maximum(mean - half, np.minimum(mean, low)), np.minimum(mean + half, np.maximum(mean, high)))
            axes.fill_between(x, *band, color=color, alpha=0.18, linewidth=0)
    label = result.metric.title or result.name
    axes.set(xlabel=unit, ylabel=f"{label} ({result.metric.unit})" if result.metric.unit else label)
    axes.set_title(result.name + best, fontsize="medium")
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:  # none without a finite value
        axes.legend(fontsize="small")


def _mean_and_band(curves: Sequence[Curve]) -> tuple[Floats, Floats, Floats]:
    """Return x, mean and half width of the 95 % t interval over runs, where all runs have values."""
    low, high = max(curve.x[0] for curve in curves), min(curve.x[-1] for curve in curves)
    x = np.linspace(low, high, _POINTS if high >= low else 0)
    values = np.stack([np.interp(x, curve.x, curve.y) for curve in curves])
    half = np.zeros(len(x))
    if len(curves) > 1:
        half = student_t(len(curves) - 1) * values.std(axis=0, ddof=1) / np.sqrt(len(curves))
    return x, values.mean(axis=0), half
