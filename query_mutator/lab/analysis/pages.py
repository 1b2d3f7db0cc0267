"""The two pages of a comparison: the report with every table, and the page of an experiment with conclusions.

The sentences are templates that the program fills with numbers; where a cause takes a person's judgment, the page says
so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from query_mutator.lab.analysis.document import Block, Bullets, Code, Document, Figure, Section, Table
from query_mutator.lab.analysis.results import Analysis, Comparison, MetricResult
from query_mutator.lab.analysis.sections import (
    by_checkpoint,
    comparison_tables,
    differences,
    other_metrics,
    overview,
    remarks,
    sentences,
    sources,
    tasks_table,
)
from query_mutator.lab.analysis.wording import number

__all__ = ["experiment", "report", "with_figure"]

_DECIDES = "Only performance metrics decide which group is better; the others say what else is different."
_CONCLUSIONS = {
    "better": "is better than the baseline",
    "worse": "is worse than the baseline",
    "equivalent": "is equivalent to the baseline within the stated margin",
}


def report(
    by_step: Analysis, by_time: Analysis | None = None, *, step_interval: float | None, interval_s: float | None
) -> Document:
    """Return the report: verdicts first, then the numbers behind them; `by_time` gives the tables by time."""
    verdicts: list[Block] = []
    for result in by_step.of_role("performance"):
        verdicts += [Bullets(items=sentences(result))] if result.comparisons else []
        verdicts += comparison_tables(result, by_step)
    return _page(
        Section("Comparison of runs", [overview(by_step)], level=0),
        Section("Verdicts", [*verdicts, *tasks_table(by_step)]),
        Section("Other metrics", [_DECIDES, *other_metrics(by_step)]),
        Section(f"By {by_step.axis}", by_checkpoint(by_step, step_interval)),
        Section("By time", by_checkpoint(by_time, interval_s) if by_time else []),
        Section("Differences between the groups", differences(by_step)),
        Section("Warnings", remarks(by_step)),
        Section("Sources of the numbers", [sources(by_step)]),
    )


def experiment(
    by_step: Analysis,
    by_time: Analysis,
    *,
    title: str,
    command: str,
    step_interval: float | None,
    interval_s: float | None,
) -> Document:
    """Return the page of an experiment: overview, findings, runs, tables, settings, hardware, conclusions."""
    performance = by_step.of_role("performance")
    findings = [line for result in performance for line in sentences(result)]
    no_finding = "No two groups have a known performance metric, so there is no finding."
    return _page(
        Section(title, [], level=0),
        Section("Experiment Overview", [_overview(by_step)]),
        Section("Results", ["Key findings:", Bullets(items=findings or [no_finding])]),
        Section("Run Analysis", [overview(by_step), "To reproduce these numbers:", Code(text=command)]),
        Section("Detailed Metrics Analysis", [table for r in performance for table in comparison_tables(r, by_step)]),
        Section("By time", by_checkpoint(by_time, interval_s), level=2),
        Section(f"By {by_step.axis}", by_checkpoint(by_step, step_interval), level=2),
        Section("Other metrics", other_metrics(by_step), level=2),
        Section("Warnings", remarks(by_step), level=2),
        Section("Configuration Changes", differences(by_step) or ["These runs have no recorded settings."]),
        Section("Hardware", _hardware(by_step)),
        Section("Conclusions", [Bullets(items=_conclusions(performance))]),
        Section("Recommendations", [Bullets(items=_recommendations(by_step, performance))]),
        Section("Sources of the numbers", [sources(by_step)]),
    )


def with_figure(document: Document, file: str, *, svg: str = "") -> Document:
    """Return the page with the curves after its verdicts, replacing an earlier figure."""
    figure = Figure(caption="Mean over runs with its 95 % interval; thin lines are single runs.", file=file, svg=svg)
    place = next((n for n, section in enumerate(document.sections) if section.title in ("Verdicts", "Results")), 0)
    sections = list(document.sections)
    kept = [block for block in sections[place].blocks if not isinstance(block, Figure)]
    sections[place] = replace(sections[place], blocks=[*kept, figure])
    return Document(sections=sections)


def _page(*sections: Section) -> Document:
    """Return the sections that have content, and the page's title."""
    return Document(sections=[section for section in sections if section.blocks or section.level == 0])


# --- words of the experiment page -------------------------------------------------------------------------------------


def _overview(analysis: Analysis) -> str:
    changed = ", ".join(row.field for row in analysis.diff) or "none of the recorded settings"
    seeds = ", ".join(f"{group.name}: {group.num_seeds}" for group in analysis.groups)
    return (
        f"{len(analysis.runs)} runs in {len(analysis.groups)} groups. What was changed between them: {changed}. "
        f"Baseline: {analysis.baseline}. Seeds by group: {seeds}."
    )


def _hardware(analysis: Analysis) -> list[Block]:
    known = [run.hardware for run in analysis.runs if run.hardware]
    if not known:
        return ["The runs did not record their hardware; compare throughput on equal hardware only."]
    names = dict.fromkeys(name for hardware in known for name in hardware)
    values = {name: list(dict.fromkeys(str(hardware.get(name, "")) for hardware in known)) for name in names}
    same = all(len(of_name) == 1 for of_name in values.values()) and len(known) == len(analysis.runs)
    table = Table(title="Hardware", header=("", "value"), rows=[(name, " | ".join(v)) for name, v in values.items()])
    not_same = "Different or unknown between runs: throughput is not comparable."
    return [table, "The same for all runs." if same else not_same]


def _conclusions(performance: Sequence[MetricResult]) -> list[str]:
    lines = [
        f"{c.group} {words} in {r.name}"
        for verdict, words in _CONCLUSIONS.items()
        for r, c in _with_verdict(performance, verdict)
    ]
    lines += [f"{c.group} in {r.name}: no conclusion ({c.why})" for r, c in _with_verdict(performance, "inconclusive")]
    return lines or ["None: nothing was compared."]


def _recommendations(analysis: Analysis, performance: Sequence[MetricResult]) -> list[str]:
    winners, unsure = _with_verdict(performance, "better"), _with_verdict(performance, "inconclusive")
    lines = [f"Keep {analysis.baseline}: nothing was shown to be better."]
    if winners:
        result, best = max(winners, key=lambda found: _size(found[1]))
        lines = [f"Use {best.group}: the best of those that are better in {result.name}; confirm it with fresh seeds."]
    if unsure:
        seeds = min(group.num_seeds for group in analysis.groups)
        detectable = min((c.detectable for _, c in unsure if math.isfinite(c.detectable)), default=None)
        seen = "" if detectable is None else f"; these seeds detect a difference of {number(detectable)}"
        lines.append(f"Run more seeds before drawing conclusions (the smallest group has {seeds}){seen}.")
    if any(row.moved for row in analysis.confounders):
        lines.append("Hold the confounders that moved constant, one at a time, before naming a cause.")
    # One line for each thing that the watch rules found, with the runs it was found in.
    found: dict[tuple[str, str], list[str]] = {}
    for finding in analysis.findings:
        found.setdefault((finding.metric, finding.says), []).append(finding.run)
    lines += [f"Check {metric} of {', '.join(runs)}: {says}." for (metric, says), runs in list(found.items())[:5]]
    return lines


def _with_verdict(performance: Sequence[MetricResult], verdict: str) -> list[tuple[MetricResult, Comparison]]:
    return [(result, c) for result in performance for c in result.comparisons if c.verdict == verdict]


def _size(comparison: Comparison) -> float:
    return abs(comparison.share) if math.isfinite(comparison.share) else abs(comparison.difference)
