"""A comparison as records: the numbers of each group, comparisons with the baseline, and values at checkpoints."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from query_mutator.lab.analysis.curves import CLOCK_AXES, Curve, Reading, value_at
from query_mutator.lab.analysis.groups import FieldDiff, Group, Moved
from query_mutator.lab.analysis.runs import Run
from query_mutator.lab.analysis.spec import MetricSpec, Role, Spec
from query_mutator.lab.analysis.watch import Finding
from query_mutator.stats.intervals import Interval
from query_mutator.stats.significance import Permutation

__all__ = [
    "Analysis", "Comparison", "GroupValue", "MetricResult", "OverTasks", "Verdict", "at_checkpoints", "checkpoints",
]  # fmt: skip

Verdict = Literal["better", "worse", "equivalent", "inconclusive"]

_CHECKPOINTS = 10  # rows when no interval is given, about
_ROUND_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14_400, 28_800, 43_200, 86_400)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupValue:
    """A metric of a group: one number per run, their mean and its interval."""

    group: str
    values: tuple[Reading, ...]
    best: tuple[Reading, ...]  # best so far of each run, for a metric with a direction
    mean: float
    interval: Interval
    sample: int | None = None  # questions that the mean is a share of
    diverged: int = 0  # runs that end in NaN or infinity; they have no number

    @property
    def numbers(self) -> list[float]:
        """Return the finite numbers, one per seed: the mean of runs that repeat it."""
        repeats: dict[int, list[float]] = {}
        for place, reading in enumerate(self.values):
            if math.isfinite(reading.value):
                repeats.setdefault(-1 - place if reading.repeat is None else reading.repeat, []).append(reading.value)
        return [math.fsum(values) / len(values) for values in repeats.values()]


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
    p_equivalent: float  # of a difference of `margin` or more, corrected in the same way; 1 without a margin
    margin: float | None
    detectable: float  # the difference these seeds detect with 80 % power
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

    @property
    def overlaps(self) -> bool:
        """Return whether the runs have a part of the axis in common."""
        return bool(max(curve.x[0] for _, curve in self.curves) <= min(curve.x[-1] for _, curve in self.curves))


@dataclass(frozen=True, slots=True, kw_only=True)
class OverTasks:
    """Several tasks of a metric: interquartile mean of a group, and probability of improvement."""

    metric: str
    group: str
    interquartile_mean: float
    interval: Interval
    improvement: float | None  # over the baseline


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """The whole comparison, from which all outputs are made."""

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


def checkpoints(result: MetricResult, *, interval: float | None = None, axis: str = "step") -> list[float]:
    """Return the multiples of `interval` in the metric's window; by default of a round one, and the window's end."""
    low, high = result.window
    if interval is not None:
        return _multiples(interval, low, high)
    if high <= low:
        return [high]
    xs = _multiples(_round_interval((high - low) / _CHECKPOINTS, axis), low, high)
    return xs if xs and math.isclose(xs[-1], high) else [*xs, high]


def _multiples(interval: float, low: float, high: float) -> list[float]:
    first = math.ceil(low / interval - 1e-9)
    return [number * interval for number in range(max(first, 1), math.floor(high / interval + 1e-9) + 1)]


def _round_interval(least: float, axis: str) -> float:
    """Return the next 1, 2 or 5 times a power of ten, or the next round duration."""
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
