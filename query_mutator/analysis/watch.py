"""Watch rules: what in a run's own curves deserves a second look, found without being asked for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from query_mutator.analysis.curves import Curve
from query_mutator.analysis.spec import MetricSpec, WatchRule

Flags = NDArray[np.bool_]

_BEFORE = 20  # points that say what is usual
_MEDIANS = 50_000  # taken of one curve at most
_ENOUGH = 10  # points below which nothing is called a plateau


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a rule found: in words, and where."""

    run: str
    metric: str
    tag: str
    rule: str
    x: float
    value: float
    says: str


def watch(curve: Curve, metric: MetricSpec) -> Iterator[Finding]:
    """Yield what the metric's rules find in a curve; values that are not finite are always reported."""
    yield from _first(curve, metric, WatchRule(rule="nan"), ~np.isfinite(curve.y), "not finite")
    sound = curve.finite()
    for rule in metric.watch if len(sound) else ():
        says = rule.says or f"{rule.rule} {rule.value:g}"
        if rule.rule == "above":
            yield from _first(sound, metric, rule, sound.y > rule.value, says)
        elif rule.rule == "below":
            yield from _first(sound, metric, rule, sound.y < rule.value, says)
        elif rule.rule == "spike":
            says = rule.says or f"more than {rule.ratio:g} times what was usual before"
            yield from _first(sound, metric, rule, _spikes(sound, rule.ratio), says)
        elif rule.rule == "plateau":
            yield from _plateau(sound, metric, rule)


def _first(curve: Curve, metric: MetricSpec, rule: WatchRule, hit: Flags, says: str) -> Iterator[Finding]:
    if hit.any():
        at, times = int(np.argmax(hit)), int(hit.sum())
        says = f"{says} ({times} of {len(curve)} points, first at {curve.x[at]:,.10g})"
        yield _finding(curve, metric, rule, at, says)


def _spikes(curve: Curve, ratio: float) -> Flags:
    """Return the points beyond `ratio` times the median of the twenty before; of very long curves, of twenty near."""
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
