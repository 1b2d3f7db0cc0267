"""Curves: a metric of a run against an axis, the number a curve is reduced to, and the rules that watch it.

axis        step | time | any counter of the metric file (updates, samples, calls ...)
time        seconds since the run's t0
a counter   interpolated over time, between its first and last point only
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from query_mutator.errors import UsageError
from query_mutator.lab.analysis.events import Floats, Series
from query_mutator.lab.analysis.runs import Run
from query_mutator.lab.analysis.spec import Direction, MetricSpec, Spec, TagPattern, WatchRule
from query_mutator.registry import check_known

__all__ = [
    "AXES", "UNITS", "Curve", "Finding", "Reading", "UnknownDivisorError", "counter_of", "curves_of",
    "reduced", "setting", "value_at", "watch",
]  # fmt: skip

AXES = ("step", "time")
UNITS = {"step": "environment steps", "time": "time since the start"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A number, and the run, tag and x it was read at; NaN where there is none."""

    run: str
    tag: str
    x: float
    value: float
    divided_by: str = ""
    repeat: int | None = None  # the run of the group that this one repeats


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One metric of one run: `x` rising [n], `y` [n] in the metric's unit, and its origin."""

    x: Floats
    y: Floats
    run: str
    tag: str
    axis: str
    divided_by: str = ""  # the setting and its value, where values were normalised
    sample: int | None = None  # questions that a value is a share of, where that is known
    fold: str = ""  # which of the questions these are; other folds have others
    repeat: int | None = None  # the run of the group that this one repeats, or its own number

    def __len__(self) -> int:
        return len(self.x)

    @property
    def diverged_at(self) -> float | None:
        """Return the x from which on no value is finite, None for a curve that ends in a number."""
        sound = np.flatnonzero(np.isfinite(self.y))
        first = int(sound[-1]) + 1 if len(sound) else 0
        return float(self.x[first]) if first < len(self) else None

    def finite(self) -> Curve:
        """Return the curve without values that are not finite."""
        sound = np.isfinite(self.y) & np.isfinite(self.x)
        return self if sound.all() else replace(self, x=self.x[sound], y=self.y[sound])

    def until(self, end: float) -> Curve:
        """Return the part up to `end`."""
        count = int(np.searchsorted(self.x, end, side="right"))
        return replace(self, x=self.x[:count], y=self.y[:count])

    def best_so_far(self, direction: Direction) -> Curve:
        """Return the running maximum, or minimum where lower is better."""
        running = np.minimum if direction == "down" else np.maximum
        return replace(self, y=running.accumulate(self.y))

    def reading(self, value: float, x: float) -> Reading:
        """Return a number read from the curve at `x`."""
        return Reading(
            run=self.run, tag=self.tag, x=float(x), value=float(value), divided_by=self.divided_by, repeat=self.repeat
        )

    def nothing(self) -> Reading:
        """Return the reading of a curve that has no such number."""
        return self.reading(math.nan, math.nan)


class UnknownDivisorError(UsageError):
    """The setting that a sum is divided by is unknown."""


def setting(run: Run, spec: Spec, name: str) -> object | None:
    """Return a setting of a run by any of its names, from its config or as it was logged as a number."""
    for alias in spec.aliases(name):
        value = alias.value(run.config)
        if value is not None:
            return value
        for tag in spec.field_tags.get(alias.field, ()):
            if tag in run.series:
                return float(run.series[tag].value[-1])
    return None


def curves_of(run: Run, metric: MetricSpec, spec: Spec, *, axis: str = "step") -> dict[str, Curve]:
    """Return task -> curve of a metric; empty when the run did not log the metric or the axis.

    UnknownDivisorError where a sum is to be divided by an unknown setting.
    """
    found = {}
    for task, (tag, pattern) in metric.tags_of(run.series).items():
        series = run.series[tag]
        x = _axis_of(run, series, spec, axis)
        if x is None:
            continue
        factor, divided_by = _factor(run, pattern, spec)
        known = np.isfinite(x)
        order = np.argsort(x[known], kind="stable")
        found[task] = Curve(
            x=x[known][order],
            y=series.value[known][order] * factor,
            run=run.name,
            tag=tag,
            axis=axis,
            divided_by=divided_by,
            sample=_sample(run, metric, spec),
            fold=str(setting(run, spec, "fold")),
        )
    return found


def _sample(run: Run, metric: MetricSpec, spec: Spec) -> int | None:
    """Return the number of questions that a value of the metric is a share of, as a run logged or set it."""
    for name in metric.sample:
        found = run.series[name].value[-1] if name in run.series else setting(run, spec, name)
        if isinstance(found, (int, float)) and 1 <= found < math.inf:
            return int(found)
    return None


def _axis_of(run: Run, series: Series, spec: Spec, axis: str) -> Floats | None:
    """Return the position of each point of a series on an axis, None when the run did not log it."""
    if axis == "step":
        return series.step.astype(np.float64)
    if axis == "time":
        return series.wall
    counter = counter_of(run, spec, axis)
    if counter is None:
        return None
    return np.asarray(np.interp(series.wall, counter.wall, counter.value, left=np.nan, right=np.nan))


def counter_of(run: Run, spec: Spec, axis: str) -> Series | None:
    """Return the series of a counter, None when the run has none; UsageError for an unknown axis."""
    check_known("axis", axis, [*AXES, *spec.axes])
    return next((run.series[tag] for tag in spec.axes.get(axis, ()) if tag in run.series), None)


def _factor(run: Run, pattern: TagPattern, spec: Spec) -> tuple[float, str]:
    if not pattern.normalise_by:
        return pattern.scale, ""
    value = next((found for name in pattern.normalise_by if (found := setting(run, spec, name)) is not None), None)
    name = pattern.normalise_by[0]
    if value is None:
        raise UnknownDivisorError(
            f"{pattern.tag} is a sum over {name}, not recorded by {run.name}; give it with --set {run.name}:{name}=8"
        )
    try:
        return pattern.scale / float(str(value)), f"{name} {value}"
    except (ValueError, ZeroDivisionError):
        raise UnknownDivisorError(f"{pattern.tag} of {run.name} cannot be divided by {name} {value!r}") from None


# --- one number of a curve --------------------------------------------------------------------------------------------


def reduced(curve: Curve, metric: MetricSpec) -> Reading:
    """Reduce a curve to one number; NaN for an empty curve, and for a threshold that was not reached."""
    curve = curve.finite()
    if not len(curve):
        return curve.nothing()
    name = metric.reducer
    if name == "best_so_far":
        best = int(np.argmax(curve.y) if metric.maximize else np.argmin(curve.y))
        return curve.reading(curve.y[best], curve.x[best])
    if name == "time_to_threshold":
        assert metric.threshold is not None
        reached = curve.y >= metric.threshold if metric.maximize else curve.y <= metric.threshold
        x = curve.x[int(np.argmax(reached))]
        return curve.reading(x, x) if reached.any() else curve.nothing()
    value = _REDUCERS[name](curve, metric)
    return curve.nothing() if value is None else curve.reading(value, curve.x[-1])


def value_at(curve: Curve, x: float, metric: MetricSpec) -> Reading:
    """Return the value at `x`, never extrapolated: the best so far at the last point before, else linear."""
    curve = curve.finite()
    if not len(curve) or not curve.x[0] <= x <= curve.x[-1]:
        return curve.nothing()
    if metric.reducer == "best_so_far":
        seen = curve.until(x)
        return seen.reading(reduced(seen, metric).value, seen.x[-1])
    return curve.reading(float(np.interp(x, curve.x, curve.y)), x)


def _area(curve: Curve, metric: MetricSpec) -> float:
    """Return the area under the curve divided by its width, which is in the metric's unit."""
    width = curve.x[-1] - curve.x[0]
    return float(np.trapezoid(curve.y, curve.x) / width) if width else float(curve.y[-1])


def _rate(curve: Curve, metric: MetricSpec) -> float | None:
    width = curve.x[-1] - curve.x[0]
    return float((curve.y[-1] - curve.y[0]) / width) if width else None


#: reducers that read a curve up to its last x
_REDUCERS: Mapping[str, Callable[[Curve, MetricSpec], float | None]] = {
    "last": lambda curve, metric: curve.y[-1],
    "mean_last_k": lambda curve, metric: curve.y[-metric.k :].mean(),
    "auc": _area,
    "rate": _rate,
    "mean": lambda curve, metric: curve.y.mean(),
    "median": lambda curve, metric: float(np.median(curve.y)),
    "max": lambda curve, metric: curve.y.max(),
    "min": lambda curve, metric: curve.y.min(),
}


# --- watch rules ------------------------------------------------------------------------------------------------------

_BEFORE = 20  # points of the median that a spike is compared with


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A finding of a rule, in words, and its place."""

    run: str
    metric: str
    tag: str
    rule: str
    x: float
    value: float
    says: str


def watch(curve: Curve, metric: MetricSpec) -> Iterator[Finding]:
    """Yield the first point that each of the metric's rules hits in a curve; NaN and infinity are always reported."""
    sound = curve.finite()
    for rule in (WatchRule(rule="nan"), *(metric.watch if len(sound) else ())):
        looked_at, hit, says = curve, ~np.isfinite(curve.y), "not finite"
        if rule.rule == "above":
            looked_at, hit, says = sound, sound.y > rule.value, f"above {rule.value:g}"
        elif rule.rule == "below":
            looked_at, hit, says = sound, sound.y < rule.value, f"below {rule.value:g}"
        elif rule.rule == "spike":
            says = f"more than {rule.ratio:g} times the median of the points before"
            looked_at, hit = sound, _spikes(sound, rule.ratio)
        if hit.any():
            x, value = float(looked_at.x[np.argmax(hit)]), float(looked_at.y[np.argmax(hit)])
            count = f"({int(hit.sum())} of {len(looked_at)} points, first at {x:,.10g})"
            says = f"{rule.says or says} {count}"
            yield Finding(run=curve.run, metric=metric.name, tag=curve.tag, rule=rule.rule, x=x, value=value, says=says)


def _spikes(curve: Curve, ratio: float) -> NDArray[np.bool_]:
    """Return the points above `ratio` times the median of the 20 before."""
    from scipy.ndimage import median_filter

    size = np.abs(curve.y)
    usual = np.roll(median_filter(size, _BEFORE, origin=_BEFORE // 2 - 1, mode="nearest"), 1)
    usual[:3] = np.inf  # of too few points
    return np.asarray((size > ratio * usual) & (usual > 0))
