"""One comparison from flags to reports: read, group, compare by the chosen axis and by time, render, write."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from functools import cached_property
from pathlib import Path

from query_mutator.files import write_text
from query_mutator.lab.analysis.compare import analyze
from query_mutator.lab.analysis.config import AnalyzeFlags
from query_mutator.lab.analysis.document import Document
from query_mutator.lab.analysis.export import as_csv, as_json
from query_mutator.lab.analysis.figures import as_svg, draw_curves, save_figure
from query_mutator.lab.analysis.groups import group_runs
from query_mutator.lab.analysis.html_page import html_page
from query_mutator.lab.analysis.pages import experiment, report, with_figure
from query_mutator.lab.analysis.results import MetricResult
from query_mutator.lab.analysis.runs import add_settings, find_runs, load_runs
from query_mutator.lab.analysis.spec import read_spec

__all__ = ["ComparisonJob"]

_FILES = ("json", "csv", "markdown", "rst", "html", "figure")  # flags that name outputs


class ComparisonJob:
    """Compare runs as the flags say. UsageError for runs, metrics or groups that do not exist."""

    def __init__(self, flags: AnalyzeFlags) -> None:
        self.flags = flags
        spec = read_spec(flags.spec).adjusted(thresholds=flags.threshold, margins=flags.margin, last_k=flags.last_k)
        runs = load_runs(find_runs(flags.runs, logdir=flags.logdir), merge_suffixed=flags.merge)
        add_settings(runs, flags.set)
        groups = group_runs(runs, spec, by=flags.group_by)
        self.by_axis, self.by_time = (
            analyze(groups, spec, axis=axis, baseline=flags.baseline, only=flags.metric)
            for axis in (flags.axis, "time")
        )
        self._seconds = flags.interval * 60 if flags.interval else None
        self._steps = self._seconds if flags.axis == "time" else flags.step_interval

    def as_json(self) -> str:
        """Return the comparison as JSON."""
        return as_json(self.by_axis)

    def as_text(self) -> str:
        """Return the report for a terminal, without the table of the sources of each number."""
        return Document(sections=self._report.sections[:-1]).render("text")

    def write(self) -> list[str]:
        """Write the files that the flags name; return their paths."""
        flags, page = self.flags, self._report if self.flags.template == "report" else self._experiment()
        drawn = self.by_axis.of_role("performance") or self.by_axis.results[:4]
        if flags.figure:
            save_figure(draw_curves(drawn, unit=self.by_axis.unit), Path(flags.figure))
            page = with_figure(page, Path(flags.figure).name)
        texts: list[tuple[str | None, Callable[[], str]]] = [
            (flags.json if flags.json != "-" else None, self.as_json),
            (flags.csv, lambda: as_csv(self.by_axis, interval=self._steps)),
            (flags.markdown, lambda: page.render("markdown")),
            (flags.rst, lambda: page.render("rst")),
            (flags.html, lambda: html_page(with_figure(page, "curves.svg", svg=self._svg(drawn)))),
        ]
        for path, text in texts:
            if path:
                write_text(path, text())
        return [path for path in (flags.figure, *(path for path, _ in texts)) if path]

    def _svg(self, drawn: Sequence[MetricResult]) -> str:
        return as_svg(draw_curves(drawn, unit=self.by_axis.unit))

    @cached_property
    def _report(self) -> Document:
        by_time = None if self.flags.axis == "time" else self.by_time
        return report(self.by_axis, by_time, step_interval=self._steps, interval_s=self._seconds)

    def _experiment(self) -> Document:
        command = shlex.join(["qm", "analyze", *self.flags.runs, *_words(self.flags)])
        return experiment(
            self.by_axis,
            self.by_time,
            title=self.flags.title,
            command=command,
            step_interval=self._steps,
            interval_s=self._seconds,
        )


def _words(flags: AnalyzeFlags) -> Iterator[str]:
    """Yield the flags that differ from their defaults, without those that name outputs."""
    for field in fields(flags):
        value, name = getattr(flags, field.name), field.name.replace("_", "-")
        if field.name in ("runs", "force") or field.name in _FILES or value == field.default:
            continue
        if isinstance(value, bool):
            yield f"--{name}" if value else f"--no-{name}"
        else:
            yield from (f"--{name}", *map(str, value if isinstance(value, tuple) else (value,)))
