"""A comparison: every metric of every run on the common window, group against baseline, with how sure it is.

R runs, G groups; x on the axis chosen
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from query_mutator.analysis.curves import (
    CLOCK_AXES,
    NOTHING,
    UNITS,
    Curve,
    Reading,
    UnknownDivisorError,
    curves_of,
    reduced,
    value_at,
)
from query_mutator.analysis.groups import FieldDiff, Group, Moved, config_diff, confounder_report
from query_mutator.analysis.runs import Run
from query_mutator.analysis.spec import MetricSpec, Role, Spec
from query_mutator.analysis.watch import Finding, watch
from query_mutator.errors import UsageError
from query_mutator.stats.intervals import BOOTSTRAP_FROM, WHOLE_LINE, Interval, mean_interval, welch_interval
from query_mutator.stats.significance import (
    Permutation,
    holm,
    minimum_detectable_effect,
    permutation_test,
    pooled_spread,
    welch_p,
)
from query_mutator.stats.tasks import interquartile_mean, probability_of_improvement, stratified_interval

Verdict = Literal["better", "worse", "equivalent", "inconclusive"]

ENOUGH_RUNS_OF_TASKS = 10  # runs x tasks from which the interquartile mean says more than the mean
CHECKPOINTS = 10  # rows when no interval is given, about
_ROUND_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14_400, 28_800, 43_200, 86_400)
LEVEL = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """A number, and the run, tag and x it was read at."""

    run: str
    tag: str
    x: float
    value: float
    divided_by: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupValue:
    """A metric of a group: one number a run, their mean and its interval."""

    group: str
    values: tuple[Traced, ...]
    best: tuple[Traced, ...]  # best so far of each run, where there is a better
    mean: float
    interval: Interval

    @property
    def numbers(self) -> list[float]:
        """Return the numbers there are, one a run."""
        return [traced.value for traced in self.values if math.isfinite(traced.value)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A group against the baseline in one metric; difference, interval and margin are in the metric's unit."""

    group: str
    baseline: str
    difference: float
    interval: Interval
    share: float  # of the baseline's mean
    permutation: Permutation | None
    p: float  # Welch's, corrected for the number of comparisons (Holm)
    margin: float | None
    detectable: float  # the difference these seeds would show with 80 % power
    verdict: Verdict
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricResult:
    """One metric of one task in all groups; compared only where its role is performance."""

    metric: MetricSpec
    task: str
    name: str  # with the task, as race_time[hock]
    window: Interval
    groups: tuple[GroupValue, ...]
    comparisons: tuple[Comparison, ...] = ()
    curves: tuple[tuple[str, Curve], ...] = ()  # group and curve of each run


@dataclass(frozen=True, slots=True, kw_only=True)
class OverTasks:
    """Several tasks of a metric together: interquartile mean by group, and probability of improvement."""

    metric: str
    group: str
    interquartile_mean: float
    interval: Interval
    improvement: float | None  # over the baseline


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """Everything that is said about the runs; all outputs are made of this."""

    axis: str
    unit: str
    baseline: str
    groups: tuple[Group, ...]
    results: tuple[MetricResult, ...]
    over_tasks: tuple[OverTasks, ...] = ()
    findings: tuple[Finding, ...] = ()
    diff: tuple[FieldDiff, ...] = ()
    confounders: tuple[Moved, ...] = ()
    remarks: tuple[str, ...] = ()
    spec: Spec = field(repr=False)

    def of_role(self, role: Role) -> list[MetricResult]:
        """Return the results of one role."""
        return [result for result in self.results if result.metric.role == role]

    @property
    def runs(self) -> list[Run]:
        """Return all runs."""
        return [run for group in self.groups for run in group.runs]


def analyze(
    groups: Sequence[Group], spec: Spec, *, axis: str = "step", baseline: str | None = None, only: Sequence[str] = ()
) -> Analysis:
    """Compare groups with the baseline group, by default the first; `only` names metrics.

    UsageError when no metric is known of any run, or the axis of none.
    """
    base = _baseline(groups, baseline)
    metrics = [spec.metric(name) for name in only] or list(spec.metrics)
    curves, left_out = _all_curves(groups, metrics, spec, axis)
    results = [_result(groups, metric, task, found) for (metric, task), found in curves.items()]
    if not results:
        raise UsageError(_nothing_known(groups, axis))
    results = _corrected([replace(result, comparisons=_comparisons(result, groups, base)) for result in results])
    return Analysis(
        axis=axis,
        unit=UNITS.get(axis, axis),
        baseline=base.name,
        groups=tuple(groups),
        results=tuple(results),
        over_tasks=tuple(_over_tasks(results, base.name)),
        findings=tuple(finding for r in results for _, curve in r.curves for finding in watch(curve, r.metric)),
        diff=tuple(config_diff(groups, spec)),
        confounders=tuple(confounder_report(groups, spec)),
        remarks=tuple(left_out + _remarks(groups, results)),
        spec=spec,
    )


def checkpoints(result: MetricResult, *, interval: float | None = None, axis: str = "step") -> list[float]:
    """Return multiples of `interval` within the metric's window; of a round one, with the window's end, by default."""
    low, high = result.window
    if interval is not None:
        return _multiples(interval, low, high)
    if high <= low:
        return [high]
    xs = _multiples(_round_interval((high - low) / CHECKPOINTS, axis), low, high)
    return xs if xs and math.isclose(xs[-1], high) else [*xs, high]


def _multiples(interval: float, low: float, high: float) -> list[float]:
    first = math.ceil(low / interval - 1e-9)
    return [number * interval for number in range(max(first, 1), math.floor(high / interval + 1e-9) + 1)]


def _round_interval(least: float, axis: str) -> float:
    """Return the next 1, 2 or 5 times a power of ten, or the next time that a clock shows as a round one."""
    if axis in CLOCK_AXES and 1 <= least <= _ROUND_S[-1]:
        return float(next(seconds for seconds in _ROUND_S if seconds >= least))
    power = 10.0 ** math.floor(math.log10(least))
    return next((times * power for times in (1, 2, 5) if times * power >= least), 10 * power)


def at_checkpoints(result: MetricResult, xs: Sequence[float]) -> dict[str, list[list[Reading]]]:
    """Return, for each group, the reading of each of its runs at each x: [X][runs]."""
    return {
        group.group: [
            [value_at(curve, x, result.metric) for name, curve in result.curves if name == group.group] for x in xs
        ]
        for group in result.groups
    }


# --- values -----------------------------------------------------------------------------------------------------------


def _baseline(groups: Sequence[Group], name: str | None) -> Group:
    if name is None:
        return groups[0]
    for group in groups:
        if name == group.name or name in [run.name for run in group.runs]:
            return group
    raise UsageError(f"--baseline {name!r} is neither a group nor a run; groups: {', '.join(g.name for g in groups)}")


def _all_curves(
    groups: Sequence[Group], metrics: Sequence[MetricSpec], spec: Spec, axis: str
) -> tuple[dict[tuple[MetricSpec, str], list[tuple[str, Curve]]], list[str]]:
    """Return (metric, task) -> group and curve of each run, and a remark for each that cannot be normalised."""
    found: dict[tuple[MetricSpec, str], list[tuple[str, Curve]]] = {}
    remarks = []
    for metric in metrics:
        for group in groups:
            for run in group.runs:
                try:
                    curves = curves_of(run, metric, spec, axis=axis)
                except UnknownDivisorError as error:
                    remarks.append(f"{metric.name} left out: {error}")
                    continue
                for task, curve in curves.items():
                    if len(curve):
                        found.setdefault((metric, task), []).append((group.name, curve))
    return found, remarks


def _result(groups: Sequence[Group], metric: MetricSpec, task: str, curves: list[tuple[str, Curve]]) -> MetricResult:
    low, high = max(curve.x[0] for _, curve in curves), min(curve.x[-1] for _, curve in curves)
    values = []
    for group in groups:
        of_group = [curve.until(high) for name, curve in curves if name == group.name]
        if of_group:
            values.append(_group_value(group.name, metric, of_group))
    return MetricResult(
        metric=metric,
        task=task,
        name=f"{metric.name}[{task}]" if task else metric.name,
        window=(float(min(low, high)), float(high)),
        groups=tuple(values),
        curves=tuple(curves),
    )


def _group_value(name: str, metric: MetricSpec, curves: Sequence[Curve]) -> GroupValue:
    values = tuple(_traced(curve, reduced(curve, metric)) for curve in curves)
    best = [reduced(curve, metric, reducer="best_so_far") if metric.direction != "-" else NOTHING for curve in curves]
    numbers = [traced.value for traced in values if math.isfinite(traced.value)]
    return GroupValue(
        group=name,
        values=values,
        best=tuple(_traced(curve, reading) for curve, reading in zip(curves, best, strict=True)),
        mean=float(np.mean(numbers)) if numbers else math.nan,
        interval=mean_interval(numbers, bootstrap_from=BOOTSTRAP_FROM),
    )


def _traced(curve: Curve, reading: Reading) -> Traced:
    return Traced(run=curve.run, tag=curve.tag, x=reading.x, value=reading.value, divided_by=curve.divided_by)


# --- verdicts ---------------------------------------------------------------------------------------------------------


def _comparisons(result: MetricResult, groups: Sequence[Group], base: Group) -> tuple[Comparison, ...]:
    values = {value.group: value for value in result.groups}
    seeds = {group.name: group.num_seeds for group in groups}
    if base.name not in values or result.metric.direction == "-":
        return ()
    spread = pooled_spread(*(value.numbers for value in values.values()))
    return tuple(
        _comparison(value, values[base.name], result.metric, spread, min(seeds[name], seeds[base.name]))
        for name, value in values.items()
        if name != base.name
    )


def _comparison(ours: GroupValue, theirs: GroupValue, metric: MetricSpec, spread: float, seeds: int) -> Comparison:
    a, b = ours.numbers, theirs.numbers
    difference = ours.mean - theirs.mean
    enough = min(len(a), len(b), seeds) >= 2
    return Comparison(
        group=ours.group,
        baseline=theirs.group,
        difference=difference,
        interval=welch_interval(a, b) if enough else WHOLE_LINE,
        share=difference / abs(theirs.mean) if theirs.mean else math.nan,
        permutation=permutation_test(a, b) if enough else None,
        p=welch_p(a, b) if enough else 1.0,
        margin=metric.margin_at(theirs.mean),
        detectable=minimum_detectable_effect(len(a), len(b), spread=spread),
        verdict="inconclusive",
        why="" if enough else "one seed says nothing about the next" if a and b else "there is no number to compare",
    )


def _corrected(results: list[MetricResult]) -> list[MetricResult]:
    """Correct p values over all comparisons that can decide, and give the verdicts."""
    deciding = [c for r in results if r.metric.role == "performance" for c in r.comparisons if not c.why]
    corrected = iter(holm([comparison.p for comparison in deciding]))
    return [
        replace(
            result,
            comparisons=tuple(
                _judged(
                    replace(c, p=next(corrected)) if result.metric.role == "performance" and not c.why else c, result
                )
                for c in result.comparisons
            ),
        )
        for result in results
    ]


def _judged(comparison: Comparison, result: MetricResult) -> Comparison:
    if comparison.why:
        return comparison
    values = {value.group: value.numbers for value in result.groups}
    narrow = welch_interval(values[comparison.group], values[comparison.baseline], level=2 * LEVEL - 1)
    margin = comparison.margin
    if margin is not None and -margin < narrow[0] and narrow[1] < margin:
        return replace(comparison, verdict="equivalent", why=f"the difference is within {margin:.3g}")
    low, high = comparison.interval
    if low <= 0 <= high:
        return replace(comparison, why=f"the interval holds 0; {comparison.detectable:.3g} could have been seen")
    if comparison.p > 1 - LEVEL:
        return replace(comparison, why=f"p = {comparison.p:.3g} after correction for several comparisons")
    better = (comparison.difference > 0) == (result.metric.direction == "up")
    return replace(comparison, verdict="better" if better else "worse", why="the interval leaves 0 out")


def _over_tasks(results: Sequence[MetricResult], base: str) -> list[OverTasks]:
    found = []
    for metric in dict.fromkeys(r.metric.name for r in results if r.metric.role == "performance" and r.task):
        tasks = [result for result in results if result.metric.name == metric]
        by_group: Mapping[str, list[list[float]]] = {
            value.group: [
                [number for other in result.groups if other.group == value.group for number in other.numbers]
                for result in tasks
            ]
            for value in tasks[0].groups
        }
        for name, values in by_group.items():
            complete = all(values) and all(by_group.get(base, []))
            if len(tasks) < 2 or not complete or sum(map(len, values)) < ENOUGH_RUNS_OF_TASKS:
                continue
            up = tasks[0].metric.direction != "down"
            ours, theirs = (values, by_group[base]) if up else (by_group[base], values)
            found.append(
                OverTasks(
                    metric=metric,
                    group=name,
                    interquartile_mean=interquartile_mean(np.concatenate(values)),
                    interval=stratified_interval(values),
                    improvement=probability_of_improvement(ours, theirs) if name != base else None,
                )
            )
    return found


# --- remarks ----------------------------------------------------------------------------------------------------------


def _remarks(groups: Sequence[Group], results: Sequence[MetricResult]) -> list[str]:
    lines = []
    alone = [group.name for group in groups if group.num_seeds == 1]
    if alone:
        lines.append(f"one seed only, which says nothing about how others would do: {', '.join(alone)}")
    if len(alone) == len(groups) > 1 and not any(run.config for group in groups for run in group.runs):
        lines.append(
            "these runs do not tell their settings, so none was taken for another seed of the same; if some are, "
            "name the groups: --group-by '{group}-s{seed}' or --group-by 'a-*,b-*'"
        )
    for group in groups:
        if 1 < group.num_seeds < len(group.runs):
            lines.append(f"{group.name}: {len(group.runs)} runs, but only {group.num_seeds} different seeds")
    if not any(result.metric.role == "performance" for result in results):
        lines.append("no performance metric is known of these runs, so nothing decides which group is better")
    for result in results:
        tags = {curve.tag for _, curve in result.curves}
        if len(tags) > 1:
            lines.append(f"{result.name}: runs log it under different tags ({', '.join(sorted(tags))})")
    return lines


def _nothing_known(groups: Sequence[Group], axis: str) -> str:
    tags = sorted({tag for group in groups for run in group.runs for tag in run.series})
    if axis != "step":
        return f"no run tells enough to draw its metrics against {axis!r}; try --axis step or --axis time"
    shown = ", ".join(tags[:8]) + (" ..." if len(tags) > 8 else "")
    return f"none of the metrics is known of these runs (they have {shown}); name the tags in a file for --spec"
