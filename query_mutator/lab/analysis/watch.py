"""Watch rules: conditions in the curves of a run that are always checked and reported."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from query_mutator.lab.analysis.curves import Curve
from query_mutator.lab.analysis.spec import MetricSpec, WatchRule

__all__ = ["Finding", "watch"]

Flags = NDArray[np.bool_]

_BEFORE = 20  # points of the median that a spike is compared with
_MEDIANS = 50_000  # computed for one curve at most
_ENOUGH = 10  # points that a plateau takes


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a rule found, in words, and where."""

    run: str
    metric: str
    tag: str
    rule: str
    x: float
    value: float
    says: str


def watch(curve: Curve, metric: MetricSpec) -> Iterator[Finding]:
    """Yield what the metric's rules find in a curve; values that are not finite are always reported."""
    yield from _hits(curve, metric, WatchRule(rule="nan"), ~np.isfinite(curve.y), "not finite")
    sound = curve.finite()
    for rule in metric.watch if len(sound) else ():
        if rule.rule == "above":
            yield from _hits(sound, metric, rule, sound.y > rule.value, f"above {rule.value:g}")
        elif rule.rule == "below":
            yield from _hits(sound, metric, rule, sound.y < rule.value, f"below {rule.value:g}")
        elif rule.rule == "spike":
            usual = f"more than {rule.ratio:g} times the median of the points before"
            yield from _hits(sound, metric, rule, _spikes(sound, rule.ratio), usual)
        elif rule.rule == "plateau":
            yield from _plateau(sound, metric, rule)


def _hits(curve: Curve, metric: MetricSpec, rule: WatchRule, hit: Flags, says: str) -> Iterator[Finding]:
    """Yield the first point that a rule hits, with the number of hits."""
    if hit.any():
        at, times = int(np.argmax(hit)), int(hit.sum())
        count = f"({times} of {len(curve)} points, first at {curve.x[at]:,.10g})"
        yield _finding(curve, metric, rule, at, f"{rule.says or says} {count}")


def _spikes(curve: Curve, ratio: float) -> Flags:
    """Return the points above `ratio` times the median of the 20 before; in very long curves, of 20 nearby."""
    size = np.abs(curve.y)
    stride = max(1, len(size) // _MEDIANS)
    usual = np.full(len(size), np.inf)
    for at in range(3, min(_BEFORE, len(size))):
        usual[at] = np.median(size[:at])
    if len(size) > _BEFORE:
        medians = np.median(sliding_window_view(size, _BEFORE)[::stride], axis=1)
        usual[_BEFORE:] = medians[np.arange(len(size) - _BEFORE) // stride]
    return np.asarray((size > ratio * usual) & (usual > 0))


def _plateau(curve: Curve, metric: MetricSpec, rule: WatchRule) -> Iterator[Finding]:
    if metric.direction == "-" or len(curve) < _ENOUGH:
        return
    best = curve.best_so_far(metric.direction).y
    reached = int(np.argmax(best == best[-1]))
    if curve.x[reached] <= curve.x[-1] - rule.share * (curve.x[-1] - curve.x[0]):
        yield _finding(curve, metric, rule, reached, rule.says or f"no new best since {curve.x[reached]:,.10g}")


def _finding(curve: Curve, metric: MetricSpec, rule: WatchRule, at: int, says: str) -> Finding:
    return Finding(
        run=curve.run,
        metric=metric.name,
        tag=curve.tag,
        rule=rule.rule,
        x=float(curve.x[at]),
        value=float(curve.y[at]),
        says=says,
    )
