"""Compare runs: every metric of every run on the common window, each group against the baseline, with verdicts.

R runs, G groups; x on the chosen axis
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from query_mutator.errors import UsageError
from query_mutator.lab.analysis.curves import (
    UNITS,
    Curve,
    Finding,
    Reading,
    UnknownDivisorError,
    curves_of,
    reduced,
    value_at,
    watch,
)
from query_mutator.lab.analysis.groups import Group, Moved, config_diff, confounder_report
from query_mutator.lab.analysis.runs import Run
from query_mutator.lab.analysis.spec import MetricSpec, Role, Spec
from query_mutator.stats import (
    WHOLE_LINE,
    Interval,
    equivalence_p,
    holm,
    mean_interval,
    minimum_detectable_effect,
    pooled_spread,
    welch_interval,
    welch_p,
    within,
)

__all__ = ["Analysis", "Comparison", "GroupValue", "MetricResult", "analyze", "at_checkpoints"]

Verdict = Literal["better", "worse", "equivalent", "inconclusive"]

LEVEL = 0.95
_FLOAT32 = 2.0**-22  # two units in the last place of the numbers in event files
_CHECKPOINTS = 10  # rows when no interval is given, about


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupValue:
    """A metric of a group: one number per run, their mean and its interval."""

    group: str
    values: tuple[Reading, ...]
    numbers: tuple[float, ...]  # the finite ones, one per seed: the mean of runs that repeat it
    mean: float
    interval: Interval
    sample: int | None = None  # questions that the mean is a share of
    diverged: int = 0  # runs that end in NaN or infinity; they have no number


@dataclass(slots=True, kw_only=True)
class Comparison:
    """A group against the baseline in one metric; difference, interval and margin are in the metric's unit."""

    group: str
    baseline: str
    difference: float
    interval: Interval
    share: float  # of the baseline's mean
    p: float  # Welch's, corrected for the number of comparisons (Holm)
    p_equivalent: float  # of a difference of `margin` or more, corrected in the same way; 1 without a margin
    margin: float | None
    detectable: float  # the difference these seeds detect with 80 % power
    verdict: Verdict
    why: str  # "" until there is a verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricResult:
    """One metric of one task in all groups; compared only where its role is performance."""

    metric: MetricSpec
    task: str
    name: str  # with the task, as race_time[hock]
    window: Interval
    groups: tuple[GroupValue, ...]
    curves: tuple[tuple[str, Curve], ...]  # group and curve of each run
    comparisons: tuple[Comparison, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """The whole comparison, from which all outputs are made."""

    axis: str
    baseline: str
    groups: tuple[Group, ...]
    results: tuple[MetricResult, ...]
    findings: tuple[Finding, ...]
    settings: Mapping[str, tuple[str, ...]]  # that differ: a value for each group
    confounders: tuple[Moved, ...]
    remarks: tuple[str, ...]

    @property
    def unit(self) -> str:
        """Return the axis in words."""
        return UNITS.get(self.axis, self.axis)

    @property
    def runs(self) -> list[Run]:
        """Return all runs."""
        return [run for group in self.groups for run in group.runs]

    def of_role(self, role: Role) -> list[MetricResult]:
        """Return the results of one role."""
        return [result for result in self.results if result.metric.role == role]


def analyze(
    groups: Sequence[Group], spec: Spec, *, axis: str = "step", baseline: str | None = None, only: Sequence[str] = ()
) -> Analysis:
    """Compare groups with the baseline group, by default the first; `only` names metrics.

    UsageError when no run has a known metric, or none has the axis.
    """
    base = _baseline(groups, baseline)
    metrics = [spec.metric(name) for name in only] or list(spec.metrics)
    curves, left_out = _all_curves(groups, metrics, spec, axis)
    results = [_result(groups, metric, task, found) for (metric, task), found in curves.items()]
    if not results:
        raise UsageError(_nothing_known(groups, axis))
    results = _compared(results, groups, base.name)
    return Analysis(
        axis=axis,
        baseline=base.name,
        groups=tuple(groups),
        results=tuple(results),
        findings=tuple(finding for r in results for _, curve in r.curves for finding in watch(curve, r.metric)),
        settings=config_diff(groups, spec),
        confounders=tuple(confounder_report(groups, spec)),
        remarks=(*left_out, *_remarks(groups, results)),
    )


def at_checkpoints(result: MetricResult, *, interval: float | None = None) -> dict[float, dict[str, list[Reading]]]:
    """Return x -> group -> the reading of each of its runs.

    x are the multiples of `interval` in the metric's window; by default about ten round ones, and the window's end.
    """
    low, high = result.window
    least = (high - low) / _CHECKPOINTS
    power = 10.0 ** math.floor(math.log10(least)) if least > 0 else 1.0
    step = interval or next((times * power for times in (1, 2, 5) if times * power >= least), 10 * power)
    first = max(1, math.ceil(low / step - 1e-9))
    xs = [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]
    if interval is None and not (xs and math.isclose(xs[-1], high)):
        xs.append(high)
    return {
        x: {
            group.group: [value_at(curve, x, result.metric) for name, curve in result.curves if name == group.group]
            for group in result.groups
        }
        for x in xs
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
    """Return (metric, task) -> group and curve of each run, and a remark for each that cannot be normalized."""
    found: dict[tuple[MetricSpec, str], list[tuple[str, Curve]]] = {}
    remarks = []
    for metric in metrics:
        for group in groups:
            for run, repeat in zip(group.runs, group.repeats, strict=True):
                try:
                    curves = curves_of(run, metric, spec, axis=axis)
                except UnknownDivisorError as error:
                    remarks.append(f"{metric.name} skipped: {error}")
                    continue
                for task, curve in curves.items():
                    if len(curve):
                        found.setdefault((metric, task), []).append((group.name, replace(curve, repeat=repeat)))
    return found, remarks


def _result(groups: Sequence[Group], metric: MetricSpec, task: str, curves: list[tuple[str, Curve]]) -> MetricResult:
    # A diverged run may have been stopped early: it does not shorten the window of the others.
    whole = [curve for _, curve in curves if curve.diverged_at is None] or [curve for _, curve in curves]
    low, high = max(curve.x[0] for curve in whole), min(curve.x[-1] for curve in whole)
    of_groups = {group.name: [curve for name, curve in curves if name == group.name] for group in groups}
    return MetricResult(
        metric=metric,
        task=task,
        name=f"{metric.name}[{task}]" if task else metric.name,
        window=(float(min(low, high)), float(high)),
        groups=tuple(_group_value(name, metric, found, until=high) for name, found in of_groups.items() if found),
        curves=tuple(curves),
    )


def _group_value(name: str, metric: MetricSpec, curves: Sequence[Curve], *, until: float) -> GroupValue:
    cut = [curve.until(until) for curve in curves]
    lost = [curve.diverged_at is not None for curve in curves]
    values = [one.nothing() if gone else reduced(one, metric) for one, gone in zip(cut, lost, strict=True)]
    repeats: dict[int, list[float]] = {}
    for place, reading in enumerate(values):
        if math.isfinite(reading.value):
            repeats.setdefault(-1 - place if reading.repeat is None else reading.repeat, []).append(reading.value)
    numbers = [math.fsum(found) / len(found) for found in repeats.values()]
    return GroupValue(
        group=name,
        values=tuple(values),
        numbers=tuple(numbers),
        mean=float(np.mean(numbers)) if numbers else math.nan,
        interval=mean_interval(numbers, bounds=metric.bounds) if len(numbers) > 1 else WHOLE_LINE,
        sample=_distinct_questions(cut),
        diverged=sum(lost),
    )


def _distinct_questions(curves: Sequence[Curve]) -> int | None:
    """Return the questions that the runs' mean is a share of: the fewest of its runs in each fold, over all folds."""
    fewest: dict[str, int] = {}
    for curve in curves:
        if curve.sample is not None:
            fewest[curve.fold] = min(curve.sample, fewest.get(curve.fold, curve.sample))
    return sum(fewest.values()) or None


# --- verdicts ---------------------------------------------------------------------------------------------------------


def _compared(results: Sequence[MetricResult], groups: Sequence[Group], base: str) -> list[MetricResult]:
    """Compare each group with the baseline in each metric; p values are corrected over all deciding comparisons."""
    seeds = {group.name: group.num_seeds for group in groups}
    compared, open_ones = [], []
    for result in results:
        bases = [value for value in result.groups if value.group == base and result.metric.direction != "-"]
        pairs = [(value, one) for one in bases for value in result.groups if value is not one]
        found = tuple(_comparison(result, *pair, seeds=seeds) for pair in pairs)
        open_ones += [(result, *pair, one) for pair, one in zip(pairs, found, strict=True) if not one.why]
        compared.append(replace(result, comparisons=found))
    deciding = [one for result, *_, one in open_ones if result.metric.role == "performance"]
    for name in ("p", "p_equivalent"):
        for one, corrected in zip(deciding, holm([getattr(one, name) for one in deciding]), strict=True):
            setattr(one, name, corrected)
    for result, ours, theirs, one in open_ones:
        one.verdict, one.why = _verdict(one, result.metric)
        if (questions := _questions(ours, theirs)) is not None:
            one.why += f"; from {questions} questions"
    return compared


def _comparison(result: MetricResult, ours: GroupValue, theirs: GroupValue, *, seeds: Mapping[str, int]) -> Comparison:
    """Return the numbers of a comparison, with p values of this one alone, or with why there are none."""
    a, b = _apart(ours.numbers, theirs.numbers)
    difference = ours.mean - theirs.mean
    margin = result.metric.margin_at(theirs.mean)
    comparison = Comparison(
        group=ours.group,
        baseline=theirs.group,
        difference=difference,
        interval=WHOLE_LINE,
        share=difference / abs(theirs.mean) if theirs.mean else math.nan,
        p=1.0,
        p_equivalent=1.0,
        margin=margin,
        detectable=_detectable(result, ours, theirs),
        verdict="inconclusive",
        why=_too_few(result, ours, theirs, seeds),
    )
    if comparison.why:
        return comparison
    lost = [value for value in (ours, theirs) if value.diverged]
    if lost:
        if len(lost) == 1:
            comparison.verdict = "worse" if ours.diverged else "better"
        told = (f"{value.diverged} of {len(value.values)} runs of {value.group} diverged" for value in lost)
        comparison.why = " and ".join(told)
        return comparison
    (low, high), noise = result.metric.bounds, _least_noise(ours, theirs)
    comparison.interval = welch_interval(a, b, noise=noise)
    if comparison.interval != WHOLE_LINE and low <= min(a + b) <= max(a + b) <= high:
        comparison.interval = within(comparison.interval, (low - high, high - low))
    comparison.p = welch_p(a, b, noise=noise)
    if margin is not None:
        comparison.p_equivalent = equivalence_p(a, b, margin, noise=_most_noise(ours, theirs))
    return comparison


def _too_few(result: MetricResult, ours: GroupValue, theirs: GroupValue, seeds: Mapping[str, int]) -> str:
    """Return why two groups cannot be compared, "" where they can."""
    if ours.diverged or theirs.diverged:
        return ""
    if not ours.numbers or not theirs.numbers:
        first, last = (fold(curve.x[at] for _, curve in result.curves) for fold, at in ((max, 0), (min, -1)))
        return "there is no number to compare" if first <= last else "the runs have no step in common"
    if min(seeds[ours.group], seeds[theirs.group]) < 2:
        return "one seed does not predict the next"
    for value in (ours, theirs):
        late = sum(not math.isfinite(reading.value) for reading in value.values)
        if late and result.metric.reducer == "time_to_threshold":  # the others would be compared without the slowest
            return f"{late} of {len(value.values)} runs of {value.group} did not reach the threshold"
    alone = [value.group for value in (ours, theirs) if len(value.numbers) < 2]
    return f"only one seed of {' and of '.join(alone)} has a number here" if alone else ""


def _apart(ours: Sequence[float], theirs: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return the numbers of two groups; equal ones where they differ by no more than event files round them."""
    a, b = list(ours), list(theirs)
    rounding = _FLOAT32 * max(map(abs, [*a, *b]), default=0.0)
    for group in (a, b):
        if group and max(group) - min(group) <= rounding:
            group[:] = [group[0]] * len(group)
    return a, b


def _verdict(comparison: Comparison, metric: MetricSpec) -> tuple[Verdict, str]:
    """Return the verdict on a comparison of several seeds, and why."""
    margin, (low, high) = comparison.margin, comparison.interval
    if margin is not None and comparison.p_equivalent <= 1 - LEVEL:
        return "equivalent", f"the difference is within {margin:.3g}"
    if not math.isfinite(high - low):
        return "inconclusive", "all runs of a group have the same value, so the noise between seeds is unknown"
    if low <= 0 <= high:
        seen = f"; {comparison.detectable:.3g} would be detectable" if math.isfinite(comparison.detectable) else ""
        return "inconclusive", f"the interval contains 0{seen}"
    if comparison.p > 1 - LEVEL:
        return "inconclusive", f"p = {comparison.p:.3g} after correction for several comparisons"
    better = (comparison.difference > 0) == metric.more_is_better
    return ("better" if better else "worse"), "the interval excludes 0"


def _questions(ours: GroupValue, theirs: GroupValue) -> int | None:
    """Return the fewest questions that a value of the two is a share of; None where that is unknown."""
    known = [value.sample for value in (ours, theirs) if value.sample is not None]
    is_share = all(0 <= number <= 1 for value in (ours, theirs) for number in value.numbers)
    return min(known) if known and is_share else None


def _least_noise(ours: GroupValue, theirs: GroupValue) -> float:
    """Return the least variance that Q questions give a difference d of shares, even if both answer the same ones.

    That is |d| (1 - |d|) / Q: all questions on which the two differ then count for the same side.
    """
    questions, difference = _questions(ours, theirs), abs(ours.mean - theirs.mean)
    return difference * (1 - difference) / questions if questions and math.isfinite(difference) else 0.0


def _most_noise(ours: GroupValue, theirs: GroupValue) -> float:
    """Return the variance of the difference of two shares of Q questions that were drawn independently.

    One question more on each side of a share, as in its plus-four interval: 8 of 8 right is not certain either.
    """
    questions = _questions(ours, theirs)
    if not questions:
        return 0.0
    shares = [(value.mean * questions + 1) / (questions + 2) for value in (ours, theirs)]
    return sum(share * (1 - share) / questions for share in shares if math.isfinite(share))


def _detectable(result: MetricResult, ours: GroupValue, theirs: GroupValue) -> float:
    """Return the difference that these seeds and questions detect with 80 % power; NaN where the noise is unknown."""
    n, m = len(ours.numbers), len(theirs.numbers)
    if not n or not m:
        return math.nan
    shared = pooled_spread(*(value.numbers for value in result.groups))
    noise = _most_noise(ours, theirs) / (1 / n + 1 / m)
    own = [pooled_spread(value.numbers) if len(value.numbers) > 1 else shared for value in (ours, theirs)]
    spread, other = (math.sqrt(one**2 + noise) for one in own)
    return minimum_detectable_effect(n, m, spreads=(spread, other))


# --- remarks ----------------------------------------------------------------------------------------------------------


def _remarks(groups: Sequence[Group], results: Sequence[MetricResult]) -> Iterator[str]:
    alone = [group.name for group in groups if group.num_seeds == 1]
    if alone:
        yield f"only one seed, which does not predict other seeds: {', '.join(alone)}"
    if len(alone) == len(groups) > 1 and not any(run.config for group in groups for run in group.runs):
        yield (
            "these runs have no recorded settings, so each is its own group; if some differ only in their seed, "
            "name the groups: --group-by '{group}-s{seed}' or --group-by 'a-*,b-*'"
        )
    for group in groups:
        if 1 < group.num_seeds < len(group.runs):
            runs = len(group.runs)
            yield f"{group.name}: {runs} runs, but only {group.num_seeds} with another seed and other numbers"
    if not any(result.metric.role == "performance" for result in results):
        yield "these runs have no known performance metric, so nothing decides which group is better"
    for result in results:
        for name, curve in result.curves:
            if (at := curve.diverged_at) is not None and result.metric.direction != "-":
                yield f"{curve.run} ({name}) diverged: {curve.tag} is not finite from {at:,.10g} on"
        tags = {curve.tag for _, curve in result.curves}
        if len(tags) > 1:
            yield f"{result.name}: runs log it under different tags ({', '.join(sorted(tags))})"


def _nothing_known(groups: Sequence[Group], axis: str) -> str:
    tags = sorted({tag for group in groups for run in group.runs for tag in run.series})
    if axis != "step":
        return f"no run logged what --axis {axis} needs; try --axis step or --axis time"
    shown = ", ".join(tags[:8]) + (" ..." if len(tags) > 8 else "")
    return f"these runs have no known metric (their tags: {shown}); name the tags in a file for --spec"
