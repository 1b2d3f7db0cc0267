"""The flags of `qm analyze` and of scripts/extract_tensorboard_data.py, checked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from query_mutator.bounds import Count, Norm, Prose
from query_mutator.cli.flags import Positional
from query_mutator.cli.outputs import FIGURE, JsonTo, Output, OutputFlags, holding

__all__ = ["AnalyzeFlags", "ExtractFlags", "RunFlags"]

_PAGE = Output(holding(b"Sources of the numbers", b"Experiment Overview"))  # headings of both pages


@dataclass(frozen=True, kw_only=True)
class RunFlags:
    """Which runs to read."""

    runs: Positional[tuple[str, ...]] = ()
    """Run folders, files of numbers, or names under --logdir, then under runs/ and tensorboard/; * matches anything."""
    logdir: str | None = None
    """Folder of run folders."""
    merge: bool = True
    """Read RUN_2 next to RUN as its continuation when its steps continue those of RUN."""

    def __post_init__(self) -> None:
        if not self.runs:
            raise ValueError("no run is named; give run folders, or names under --logdir")


@dataclass(frozen=True, kw_only=True)
class ExtractFlags(RunFlags, OutputFlags):
    """Write every point of the chosen tags as CSV: run, tag, step, seconds since the run's start, value."""

    tag: tuple[str, ...] = ()
    """Tags, * matches anything; by default the tags are listed."""
    csv: Annotated[str | None, Output(holding(b"run,tag,step,time_s,value"))] = None
    """File to write to; by default standard output."""


@dataclass(frozen=True, kw_only=True)
class AnalyzeFlags(RunFlags, OutputFlags):
    """Compare runs of any trainer, by step and by time, with confidence intervals and tests.

    For Query Mutator runs question by question on held-out questions, use `qm compare`.
    """

    FIRST: ClassVar[tuple[str, ...]] = (
        "runs", "logdir", "metric", "group_by", "baseline", "axis", "threshold", "margin", "template", "json", "csv",
        "markdown", "html", "figure",
    )  # fmt: skip

    spec: str | None = None
    """Metric file (YAML); by default one for the tags of SB3, CleanRL and our trainers."""
    metric: tuple[str, ...] = ()
    """Metrics to compare; by default all."""
    group_by: str | None = None
    """Setting, or several with commas; patterns with * and commas; or {group}-s{seed}. By default all but the seed."""
    baseline: str | None = None
    """Group or run that the others are compared with; by default the first."""
    axis: str = "step"
    """x axis of the curves: step, time, active, gpu_hours, updates, samples, calls."""
    interval: Norm | None = None
    """Minutes between rows of the table by time; by default ten rows."""
    step_interval: Norm | None = None
    """Steps between rows of the table by step; by default ten rows."""
    threshold: tuple[str, ...] = ()
    """METRIC=VALUE: report when each run first reached it."""
    margin: tuple[str, ...] = ()
    """METRIC=VALUE, or METRIC=5%: differences up to it count as equivalent."""
    last_k: Count | None = None
    """Points in the mean of the last k; by default as in the metric file."""
    set: tuple[Prose, ...] = ()
    """RUN:NAME=VALUE: a setting that the run did not record; * in RUN matches anything."""
    template: Literal["report", "experiment"] = "report"
    """Page to write: all tables, or that of an experiment with conclusions."""
    title: Prose = "Experiment"
    """Title of the experiment page."""
    json: JsonTo = None
    """Write everything as JSON to FILE; without FILE, or with -, print it in place of the tables."""
    csv: Annotated[str | None, Output(holding(b"metric,task,role,group,run,tag,"))] = None
    """File for every number with run, tag and x."""
    markdown: Annotated[str | None, _PAGE] = None
    """File for the report as Markdown."""
    rst: Annotated[str | None, _PAGE] = None
    """File for the report as reStructuredText."""
    html: Annotated[str | None, _PAGE] = None
    """File for the report as one HTML page with curves."""
    figure: Annotated[str | None, FIGURE] = None
    """File for the curves, .png or .svg."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.figure is not None and Path(self.figure).suffix not in (".png", ".svg"):
            raise ValueError(f"figure={self.figure} must end in .png or .svg")
