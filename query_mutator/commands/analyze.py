"""`qm analyze` and the scripts of experiments: runs compared, and points of TensorBoard files as CSV."""

from __future__ import annotations

import fnmatch
import io
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, ClassVar, TextIO

from query_mutator.bounds import Norm, Prose
from query_mutator.cli.console import note, run_cli, table
from query_mutator.cli.flags import Positional, parse_flags
from query_mutator.cli.outputs import FIGURE, JsonTo, Output, OutputFlags, holding
from query_mutator.errors import UsageError
from query_mutator.files import atomic_write
from query_mutator.lab.analysis.compare import Analysis, analyze
from query_mutator.lab.analysis.groups import group_runs
from query_mutator.lab.analysis.report import Figure, as_csv, as_json, draw_curves, page, render, write_csv
from query_mutator.lab.analysis.runs import Run, add_settings, find_runs, load_runs
from query_mutator.lab.analysis.spec import read_spec
from query_mutator.registry import nearest

_PAGE = Output(holding(b"Experiment Overview"))


@dataclass(frozen=True, kw_only=True)
class RunFlags:
    """Selection of runs to read."""

    runs: Positional[tuple[str, ...]] = ()
    """Run folders, files of numbers, or names under --logdir, then under runs/ and tensorboard/; * matches anything."""
    logdir: str | None = None
    """Folder of run folders."""
    merge: bool = True
    """Read RUN_2 next to RUN as its continuation when its steps continue those of RUN."""

    def __post_init__(self) -> None:
        if not self.runs:
            raise ValueError("no run is named; give run folders, or names under --logdir")

    def load(self) -> list[Run]:
        """Return the runs; UsageError for one that does not exist or logged nothing."""
        return load_runs(find_runs(self.runs, logdir=self.logdir), merge_suffixed=self.merge)


@dataclass(frozen=True, kw_only=True)
class AnalyzeFlags(RunFlags, OutputFlags):
    """Compare runs of any trainer, by step or by time, with confidence intervals and tests.

    For Query Mutator runs question by question on held-out questions, use `qm compare`.
    """

    FIRST: ClassVar[tuple[str, ...]] = (
        "runs", "logdir", "metric", "group_by", "baseline", "axis", "threshold", "margin", "json", "csv", "markdown",
        "html", "figure",
    )  # fmt: skip

    spec: str | None = None
    """Metric file (TOML or YAML); by default one for the tags of SB3, CleanRL and Query Mutator."""
    metric: tuple[str, ...] = ()
    """Metrics or logged tags to compare, by default all metrics; TAG:down where lower values are better."""
    group_by: str | None = None
    """Setting, or several with commas; patterns with * and commas; or {group}-s{seed}. By default all but the seed."""
    baseline: str | None = None
    """Group or run to compare with; by default the first."""
    axis: str = "step"
    """x axis of the curves: step, time, updates, samples, calls."""
    interval: Norm | None = None
    """Spacing of table rows along the axis, in its unit (seconds for time); by default ten rows."""
    threshold: tuple[str, ...] = ()
    """METRIC=VALUE: compare when each run first reached it."""
    margin: tuple[str, ...] = ()
    """METRIC=VALUE, or METRIC=5%: differences up to it count as equivalent."""
    set: tuple[Prose, ...] = ()
    """RUN:NAME=VALUE: a setting that the run did not record; * in RUN matches anything."""
    title: Prose = "Comparison of runs"
    """Title of the page."""
    json: JsonTo = None
    """Write everything as JSON to FILE; without FILE, or with -, print it in place of the tables."""
    csv: Annotated[str | None, Output(holding(b"metric,task,role,group,run,tag,"))] = None
    """File for every number with run, tag and x."""
    markdown: Annotated[str | None, _PAGE] = None
    """File for the page as Markdown."""
    rst: Annotated[str | None, _PAGE] = None
    """File for the page as reStructuredText."""
    html: Annotated[str | None, _PAGE] = None
    """File for the page as one HTML file with curves."""
    figure: Annotated[str | None, FIGURE] = None
    """File for the curves, .png or .svg."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.figure is not None and Path(self.figure).suffix not in (".png", ".svg"):
            raise ValueError(f"figure={self.figure} must end in .png or .svg")


_NOT_NAMED = ("runs", "force", "json", "csv", "markdown", "rst", "html", "figure")  # flags that change no number


def compare_runs(flags: AnalyzeFlags) -> None:
    """Read, group and compare runs, print the page, and write the files asked for."""
    runs = flags.load()
    spec, only = read_spec(flags.spec).with_tags(flags.metric, {tag for run in runs for tag in run.series})
    spec = spec.adjusted(thresholds=flags.threshold, margins=flags.margin)
    add_settings(runs, flags.set)
    groups = group_runs(runs, spec, by=flags.group_by)
    analysis = analyze(groups, spec, axis=flags.axis, baseline=flags.baseline, only=only)
    command = shlex.join(["qm", "analyze", *flags.runs, *_words(flags)])

    def sections(figure: Figure | None = None) -> Any:
        return page(analysis, title=flags.title, command=command, every=flags.interval, figure=figure)

    sys.stdout.write(as_json(analysis) if flags.json == "-" else render(sections(), "text"))
    drawn = Figure(file=Path(flags.figure).name) if flags.figure else None
    outputs: dict[str, Callable[[], str | bytes]] = {
        "json": lambda: as_json(analysis),
        "csv": lambda: as_csv(analysis, interval=flags.interval),
        "markdown": lambda: render(sections(drawn), "markdown"),
        "rst": lambda: render(sections(drawn), "rst"),
        "html": lambda: render(sections(Figure(svg=_curves(analysis, "svg").decode())), "html"),
        "figure": lambda: _curves(analysis, Path(flags.figure or "").suffix[1:]),
    }
    written = {name: path for name in outputs if (path := getattr(flags, name)) not in (None, "-")}
    for name, path in written.items():
        content = outputs[name]()
        with atomic_write(path) as file:
            file.write(content if isinstance(content, bytes) else content.encode())
    note(*written.values())


def _curves(analysis: Analysis, format: str) -> bytes:
    results = analysis.of_role("performance") or analysis.results[:4]
    return draw_curves(results, unit=analysis.unit, format=format)


def _words(flags: AnalyzeFlags) -> Iterator[str]:
    """Yield the flags that differ from their defaults, without those that name outputs."""
    for field in fields(flags):
        value, name = getattr(flags, field.name), field.name.replace("_", "-")
        if field.name in _NOT_NAMED or value == field.default:
            continue
        if isinstance(value, bool):
            yield f"--{name}" if value else f"--no-{name}"
        else:
            yield from (f"--{name}", *map(str, value if isinstance(value, tuple) else (value,)))


def main(argv: Sequence[str]) -> int:
    """Compare as the command line says; return the exit code."""
    compare_runs(parse_flags(AnalyzeFlags, argv, prog="analyze_experiment.py"))
    return 0


def run() -> None:
    """Run the comparison and end the process."""
    run_cli(main, prog="analyze_experiment")


# --- scripts/extract_tensorboard_data.py: every point of chosen tags as CSV, or a list of the tags --------------------


@dataclass(frozen=True, kw_only=True)
class ExtractFlags(RunFlags, OutputFlags):
    """Write every point of the chosen tags as CSV: run, tag, step, seconds since the run's start, value."""

    tag: tuple[str, ...] = ()
    """Tags, * matches anything; by default the tags are listed."""
    csv: Annotated[str | None, Output(holding(b"run,tag,step,time_s,value"))] = None
    """File to write to; by default standard output."""


def extract(argv: Sequence[str]) -> int:
    """Extract as the command line says; return the exit code."""
    flags = parse_flags(ExtractFlags, argv, prog="extract_tensorboard_data.py")
    runs = flags.load()
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
