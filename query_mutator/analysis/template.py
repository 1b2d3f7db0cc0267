"""The experiment page: overview, findings, runs, numbers by time and by step, settings, hardware, conclusions.

The words are fixed, the numbers are put in by the program; where it takes a person to know why, the page says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from query_mutator.analysis.compare import Analysis, Comparison, MetricResult
from query_mutator.analysis.document import Block, Bullets, Code, Document, Section, Table
from query_mutator.analysis.pages import (
    by_checkpoint,
    comparison_table,
    differences,
    other_metrics,
    overview,
    readings_table,
    second_looks,
    sentence,
    sources,
)
from query_mutator.analysis.wording import number


def experiment(
    by_step: Analysis,
    by_time: Analysis,
    *,
    title: str,
    command: str,
    step_interval: float | None,
    interval_s: float | None,
) -> Document:
    """Return the page of an experiment."""
    performance = by_step.of_role("performance")
    tables: list[Block] = []
    for result in performance:
        tables += [comparison_table(result, by_step), readings_table(result)]
    sections = [
        Section(title=title, level=0),
        Section(title="Experiment Overview", blocks=_overview(by_step)),
        Section(title="Results", blocks=("Key findings:", Bullets(items=_findings(by_step)))),
        Section(title="Run Analysis", blocks=(overview(by_step), "To have these numbers again:", Code(text=command))),
        Section(title="Detailed Metrics Analysis", blocks=tuple(tables)),
        Section(title="By time", level=2, blocks=by_checkpoint(by_time, interval_s)),
        Section(title=f"By {by_step.axis}", level=2, blocks=by_checkpoint(by_step, step_interval)),
        Section(title="Other metrics", level=2, blocks=other_metrics(by_step)),
        Section(title="What deserves a second look", level=2, blocks=second_looks(by_step)),
        Section(
            title="Configuration Changes", blocks=differences(by_step) or ("No settings are known of these runs.",)
        ),
        Section(title="Hardware", blocks=_hardware(by_step)),
        Section(title="Conclusions", blocks=(Bullets(items=_conclusions(performance)),)),
        Section(title="Recommendations", blocks=(Bullets(items=_recommendations(by_step, performance)),)),
        Section(title="Where the numbers come from", blocks=(sources(by_step),)),
    ]
    return Document(sections=tuple(section for section in sections if section.blocks or section.level == 0))


def _overview(analysis: Analysis) -> tuple[Block, ...]:
    changed = ", ".join(row.field for row in analysis.diff) or "nothing that the runs' settings tell"
    seeds = ", ".join(f"{group.name}: {group.num_seeds}" for group in analysis.groups)
    return (
        f"{len(analysis.runs)} runs in {len(analysis.groups)} groups. What was changed between them: {changed}. "
        f"Baseline: {analysis.baseline}. Seeds by group: {seeds}.",
    )


def _findings(analysis: Analysis) -> tuple[str, ...]:
    lines = [sentence(result, c) for result in analysis.of_role("performance") for c in result.comparisons]
    return tuple(lines) or ("No performance metric is known of two groups, so there is no finding.",)


def _hardware(analysis: Analysis) -> tuple[Block, ...]:
    known = {run.name: run.hardware for run in analysis.runs if run.hardware}
    if not known:
        return ("The runs do not tell what they ran on; throughput can be compared on equal hardware only.",)
    names = list(dict.fromkeys(name for hardware in known.values() for name in hardware))
    values = {name: tuple(dict.fromkeys(str(hardware.get(name, "")) for hardware in known.values())) for name in names}
    rows = tuple((name, " | ".join(of_name)) for name, of_name in values.items())
    same = all(len(of_name) == 1 for of_name in values.values()) and len(known) == len(analysis.runs)
    remark = (
        "The same for all runs." if same else "Not the same, or not known, for all runs: throughput is not comparable."
    )
    return (Table(title="Hardware", header=("", "value"), rows=rows), remark)


def _conclusions(performance: Sequence[MetricResult]) -> tuple[str, ...]:
    lines = []
    for verdict, words in (
        ("better", "is better than the baseline"),
        ("worse", "is worse than the baseline"),
        ("equivalent", "is equivalent to the baseline within the stated margin"),
    ):
        lines += [f"{c.group} {words} in {r.name}" for r in performance for c in r.comparisons if c.verdict == verdict]
    open_ones = [(r, c) for r in performance for c in r.comparisons if c.verdict == "inconclusive"]
    lines += [f"{c.group} in {r.name}: no conclusion ({c.why})" for r, c in open_ones]
    return tuple(lines) or ("None: nothing was compared.",)


def _recommendations(analysis: Analysis, performance: Sequence[MetricResult]) -> tuple[str, ...]:
    lines = []
    winners = [(r, c) for r in performance for c in r.comparisons if c.verdict == "better"]
    if winners:
        result, winner = max(winners, key=lambda found: _size(found[1]))
        lines.append(
            f"Use {winner.group}: the best of those that are better in {result.name}; confirm it with fresh seeds."
        )
    else:
        lines.append(f"Stay with {analysis.baseline}: nothing was shown to be better.")
    unsure = [(r, c) for r in performance for c in r.comparisons if c.verdict == "inconclusive"]
    if unsure:
        seeds = min(group.num_seeds for group in analysis.groups)
        detectable = min((c.detectable for _, c in unsure if math.isfinite(c.detectable)), default=math.nan)
        seen = (
            f"; with these seeds a difference of {number(detectable)} could be seen"
            if math.isfinite(detectable)
            else ""
        )
        lines.append(f"Run more seeds before drawing conclusions (the smallest group has {seeds}){seen}.")
    if any(row.moved for row in analysis.confounders):
        lines.append("Hold the figures that moved along constant, one at a time, before naming a cause.")
    return (*lines, *_looks(analysis))


def _looks(analysis: Analysis) -> list[str]:
    """Return a line for each thing that the watch rules found, with the runs it was found in."""
    found: dict[tuple[str, str], list[str]] = {}
    for finding in analysis.findings:
        found.setdefault((finding.metric, finding.says), []).append(finding.run)
    return [f"Look at {metric} of {', '.join(runs)}: {says}." for (metric, says), runs in list(found.items())[:5]]


def _size(comparison: Comparison) -> float:
    return abs(comparison.share) if math.isfinite(comparison.share) else abs(comparison.difference)
