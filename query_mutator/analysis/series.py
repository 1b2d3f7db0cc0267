"""One tag of one run: its points in rising steps, made of what several files, also of resumed runs, say about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from query_mutator.analysis.events import Floats, Points
from query_mutator.analysis.records import Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Points of one tag, one a step: `wall` in seconds since the run's t0."""

    tag: str
    step: Ints  # [n], rising
    wall: Floats  # [n]
    value: Floats  # [n], may hold NaN and infinities
    source: str  # file or folder the points came from

    def __len__(self) -> int:
        return len(self.step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one file says of one tag; `restarts` are steps from which on the parts before it no longer count."""

    points: Points
    first_wall: float
    last_wall: float
    restarts: Sequence[int] = ()


def merged(parts: Sequence[Part]) -> Points:
    """Return the points of all parts, one a step, the latest of those that share it.

    A part that begins after the one before it has ended went on from a checkpoint: what the earlier one logged from
    that step on was lost with it. Parts that overlap in time were written side by side, and only equal steps clash.
    """
    parts = sorted(parts, key=lambda part: part.first_wall)
    kept: list[Points] = []
    for number, part in enumerate(parts):
        points = part.points
        cuts = [int(later.points.step.min()) for later in parts[number + 1 :] if later.first_wall >= part.last_wall]
        cuts += [step for later in parts[number + 1 :] for step in later.restarts]
        if cuts:
            points = points.take(points.step < min(cuts))
        kept.append(points)
    return _latest_of_each_step(Points.joined(kept))


def _latest_of_each_step(points: Points) -> Points:
    if (np.diff(points.step) > 0).all():
        return points
    order = np.lexsort((np.arange(len(points.step)), points.wall, points.step))
    last = np.append(np.diff(points.step[order]) > 0, True)
    return points.take(order[last])
