"""`qm analyze`: flags in, reports out."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal

from tyro.conf import Positional

from query_mutator.analysis.compare import analyze
from query_mutator.analysis.document import Document
from query_mutator.analysis.export import as_csv, as_json
from query_mutator.analysis.figures import as_svg, draw_curves, save_figure
from query_mutator.analysis.groups import group_runs, merge_config
from query_mutator.analysis.html_page import html_page
from query_mutator.analysis.pages import experiment, report, with_figure
from query_mutator.analysis.runs import find_runs, load_runs
from query_mutator.analysis.spec import read_spec
from query_mutator.cli.console import note, run_cli
from query_mutator.cli.flags import parse_flags
from query_mutator.errors import UsageError
from query_mutator.files import disk_errors

PICTURES = (".png", ".svg")
_FILES = ("json", "csv", "markdown", "rst", "html", "figure")  # flags that say where to, not what


@dataclass(frozen=True, kw_only=True)
class AnalyzeFlags:
    """Compare runs of any trainer, by step and by time, and say how sure the answer is."""

    runs: Positional[tuple[str, ...]] = ()
    """Run folders, files of numbers, or names under --logdir, then under runs/; * stands for anything."""
    logdir: str | None = None
    """Folder of run folders."""
    spec: str | None = None
    """Metric file (YAML); by default the one that knows SB3, CleanRL and our trainers."""
    metric: tuple[str, ...] = ()
    """Names of metrics to look at; by default all."""
    group_by: str | None = None
    """Setting, or several with commas; patterns with * and commas; or {group}-s{seed}. By default all but the seed."""
    baseline: str | None = None
    """Group or run that the others are compared with; by default the first."""
    axis: str = "step"
    """What metrics are drawn against: step, time, active, gpu_hours, updates, samples, calls."""
    interval: float | None = None
    """Minutes between rows of the table by time; by default ten rows."""
    step_interval: float | None = None
    """Steps between rows of the table by step; by default ten rows."""
    threshold: tuple[str, ...] = ()
    """METRIC=VALUE: when did a run first reach it?"""
    margin: tuple[str, ...] = ()
    """METRIC=VALUE, or METRIC=5%: differences up to it count as equivalent."""
    last_k: int | None = None
    """Points that the mean of the last k takes; by default as the metric file says."""
    set: tuple[str, ...] = ()
    """RUN:NAME=VALUE: a setting that the run does not tell; * in RUN stands for anything."""
    merge: bool = True
    """Take RUN_2 beside RUN as its continuation when it goes on where RUN was."""
    template: Literal["report", "experiment"] = "report"
    """Which page the reports are: all tables, or that of an experiment with conclusions."""
    title: str = "Experiment"
    """Title of the experiment page."""
    json: str | None = None
    """File for everything as JSON; - for the terminal, instead of the tables."""
    csv: str | None = None
    """File for every number with run, tag and x."""
    markdown: str | None = None
    """File for the report as Markdown."""
    rst: str | None = None
    """File for the report as reStructuredText."""
    html: str | None = None
    """File for the report as one HTML page with curves."""
    figure: str | None = None
    """File for the curves, .png or .svg."""

    def __post_init__(self) -> None:
        if not self.runs:
            raise ValueError("no run is named; give run folders, or names under --logdir")
        for name in ("interval", "step_interval", "last_k"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name}={value} must be above 0")
        if self.figure is not None and Path(self.figure).suffix not in PICTURES:
            raise ValueError(f"figure={self.figure} must end in .png or .svg")


def main(argv: Sequence[str]) -> int:
    """Compare as the command line says; return the exit code."""
    compare_runs(parse_flags(AnalyzeFlags, argv, prog="analyze_experiment.py"))
    return 0


def run() -> None:
    """Run the command and end the process."""
    run_cli(main, prog="analyze_experiment")


def compare_runs(flags: AnalyzeFlags) -> None:
    """Read, compare, print, and write the files asked for."""
    spec = _spec(flags)
    runs = _runs(flags)
    groups = group_runs(runs, spec, by=flags.group_by)
    by_axis, by_time = (
        analyze(groups, spec, axis=axis, baseline=flags.baseline, only=flags.metric) for axis in (flags.axis, "time")
    )
    steps, seconds = flags.step_interval, flags.interval * 60 if flags.interval else None
    if flags.axis == "time":
        steps = seconds
    page = report(by_axis, None if flags.axis == "time" else by_time, step_interval=steps, interval_s=seconds)
    if flags.json == "-":
        sys.stdout.write(as_json(by_axis))
    else:
        print(Document(sections=page.sections[:-1]).render("text"), end="")  # the last are the sources of each number
    if flags.template == "experiment":
        page = _experiment(flags, by_axis, by_time, steps, seconds)
    _write(flags.json if flags.json != "-" else None, lambda: as_json(by_axis))
    _write(flags.csv, lambda: as_csv(by_axis, interval=steps))
    _write_pages(flags, page, by_axis)


def _spec(flags: AnalyzeFlags) -> Any:
    spec = read_spec(flags.spec)
    changes: dict[str, dict[str, Any]] = {name: {} for name in (metric.name for metric in spec.metrics)}
    for flag, given in (("threshold", flags.threshold), ("margin", flags.margin)):
        for item in given:
            name, _, value = item.partition("=")
            spec.metric(name)
            changes[name][flag] = _number(value, f"--{flag} {item}") if flag == "threshold" else _margin(value, item)
    if flags.last_k:
        changes = {name: {**change, "k": flags.last_k} for name, change in changes.items()}
    return replace(spec, metrics=tuple(replace(metric, **changes[metric.name]) for metric in spec.metrics))


def _margin(value: str, item: str) -> str:
    _number(value.removesuffix("%"), f"--margin {item}")
    return value


def _number(value: str, written: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise UsageError(f"{written}: write METRIC=NUMBER, as success=0.8") from None


def _runs(flags: AnalyzeFlags) -> Any:
    runs = load_runs(find_runs(flags.runs, logdir=flags.logdir), merge_suffixed=flags.merge)
    for item in flags.set:
        run_name, colon, rest = item.partition(":")
        name, equals, value = rest.partition("=")
        matching = [run for run in runs if fnmatch(run.name, run_name)]
        if not (colon and equals and matching):
            names = ", ".join(run.name for run in runs)
            raise UsageError(f"--set {item}: write RUN:NAME=VALUE, with a run of these: {names}")
        for run in matching:
            merge_config(run, {name: value})
    return runs


def _experiment(flags: AnalyzeFlags, by_axis: Any, by_time: Any, steps: float | None, seconds: float | None) -> Any:
    command = shlex.join(["qm", "analyze", *flags.runs, *_words(flags)])
    return experiment(by_axis, by_time, title=flags.title, command=command, step_interval=steps, interval_s=seconds)


def _words(flags: AnalyzeFlags) -> Iterator[str]:
    """Yield the flags that are not at their defaults, those for files left out."""
    for field in fields(flags):
        value, name = getattr(flags, field.name), field.name.replace("_", "-")
        if field.name == "runs" or field.name in _FILES or value == field.default:
            continue
        if isinstance(value, bool):
            yield f"--{name}" if value else f"--no-{name}"
        else:
            yield from (f"--{name}", *map(str, value if isinstance(value, tuple) else (value,)))


def _write_pages(flags: AnalyzeFlags, page: Any, analysis: Any) -> None:
    drawn = analysis.of_role("performance") or list(analysis.results[:4])
    if flags.figure:
        save_figure(draw_curves(drawn, unit=analysis.unit), Path(flags.figure))
        note(flags.figure)
        page = with_figure(page, Path(flags.figure).name)
    _write(flags.markdown, lambda: page.render("markdown"))
    _write(flags.rst, lambda: page.render("rst"))
    if flags.html:
        page = with_figure(page, "curves.svg", svg=as_svg(draw_curves(drawn, unit=analysis.unit)))
        _write(flags.html, lambda: html_page(page))


def _write(path: str | None, text: Any) -> None:
    if path is not None:
        with disk_errors(path):
            Path(path).write_text(text(), encoding="utf-8")
        note(path)
