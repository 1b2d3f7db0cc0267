"""The optimum of a response surface in log space, how certain it is, and where the grid cannot tell.

    N results, C cells (settings), D axes, B simulated surfaces

Surfaces that agree with the results (`kriging`, a parametric bootstrap) and the settings that do not differ from the
best one (`cells`) give a region for the optimum, simultaneous over the axes. The verdict is the first that holds:

    coarse      next to one of the best settings the means fall abruptly: a cliff, or a peak narrower than the grid
    ridge       the region is narrow across a diagonal and long along it: two settings trade off against each other
    undecided   several regions are alike: between settings another peak may be higher than the best setting
    interior    the region reaches no end, and the middle beats both ends of every axis (intersection-union test)
    plateau     the region reaches an end, and the levels up to there do not differ
    edge        the region reaches one end of an axis and not the other
    undecided   anything else; along an axis on which the region reaches both ends, nothing was found
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from query_mutator.lab.sweep.cells import CONFIDENCE, Cells, End
from query_mutator.lab.sweep.kriging import Surface
from query_mutator.lab.sweep.shapes import Flat, Ridge, find_flats, find_ridge, finer_grid
from query_mutator.stats.intervals import Floats

__all__ = ["AxisOptimum", "Optimum", "find_optimum", "pareto_front"]

Kind = Literal["interior", "edge", "undecided", "ridge", "plateau", "coarse"]

_EXCLUDED = (1 - CONFIDENCE) / 2  # p value that excludes an end; half, because the same results chose the optimum
_LEVELS = 3  # values per axis that a quadratic needs


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisOptimum:
    """The optimum on one axis, in the unit of the axis."""

    name: str
    best: float
    low: float
    high: float
    at_edge: End | None  # nearly all surfaces have their maximum at that end of the grid
    reaches: tuple[End, ...]  # ends that the region reaches

    @property
    def is_flat(self) -> bool:
        """Return whether the region reaches from end to end, so that the axis makes no visible difference."""
        return len(self.reaches) == 2

    @property
    def end(self) -> str:
        """Return the one end, low or high, that the region reaches; "" where it reaches none or both."""
        return self.reaches[0] if len(self.reaches) == 1 else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimum:
    """The optimum of a surface; `p` is the largest p value of the optimum against the ends of the axes."""

    kind: Kind
    axes: tuple[AxisOptimum, ...]
    predicted: float
    p: float
    confidence: float
    why: str
    ridge: Ridge | None = None
    plateaus: tuple[Flat, ...] = ()
    finer: tuple[str, ...] = ()  # NAME=VALUE,VALUE for --grid where the grid is too coarse


def find_optimum(x: Floats, y: Floats, *, names: Sequence[str], maximize: bool = True) -> Optimum:
    """Return the optimum of `y` [N] over settings `x` [N, D], all above 0; ValueError when the grid is too small."""
    logs, values = np.log2(np.asarray(x, dtype=np.float64)), np.asarray(y, dtype=np.float64)
    _check(logs, values, names)
    scale = (float(np.abs(values).max()) or 1.0) * (1 if maximize else -1)  # squares of large numbers overflow
    cells = Cells(logs, values / scale)
    surface = Surface(cells, np.random.default_rng(0))
    finer = finer_grid(cells, names)
    (low, high), best, predicted = _region(cells, surface, is_coarse=bool(finer))
    ends = logs.min(axis=0), logs.max(axis=0)
    is_at = surface.end_shares() > 1 - _EXCLUDED
    axes = tuple(
        _axis(name, best[d], low[d], high[d], (ends[0][d], ends[1][d]), 0.0 if finer else step, is_at=is_at[d])
        for d, (name, step) in enumerate(zip(names, surface.steps, strict=True))
    )
    flats = find_flats(cells, [axis.reaches for axis in axes], names, scale=scale)
    line = find_ridge(cells, surface, [bool(axis.reaches) for axis in axes], names)
    p = float(surface.end_p().max())
    peaks = tuple(_place(cells, cell, names) for cell in (cells.best, *cells.rivals))
    kind, why = _verdict(axes, p, finer=finer, ridge=line, flats=flats, peaks=peaks)
    return Optimum(
        kind=kind,
        axes=axes,
        predicted=scale * predicted,
        p=p,
        confidence=CONFIDENCE,
        why=why,
        ridge=line if kind == "ridge" else None,
        plateaus=flats if kind == "plateau" else (),
        finer=finer,
    )


def pareto_front(performance: Sequence[float], throughput: Sequence[float]) -> list[int]:
    """Return the settings that no other beats in both, the fastest last; higher is better in both."""
    points = list(enumerate(zip(performance, throughput, strict=True)))
    front = [
        at
        for at, (p, t) in points
        if not any(q >= p and u >= t and (q > p or u > t) for other, (q, u) in points if other != at)
    ]
    return sorted(front, key=lambda at: throughput[at])


def _region(cells: Cells, surface: Surface, *, is_coarse: bool) -> tuple[tuple[Floats, Floats], Floats, float]:
    """Return the region's ends [D] in log2, the best place [D], and the value there.

    Where the surface does not fit, the region is what holds for a single peak of any form.
    """
    if is_coarse:
        return cells.bracket(), cells.places[cells.best], float(cells.means[cells.best])
    tail = (1 - CONFIDENCE) / 2 / cells.places.shape[1]
    low, high = np.quantile(surface.optima(), [tail, 1 - tail], axis=0)
    close_cells = _likely(cells, surface)
    low, high = np.minimum(low, close_cells.min(axis=0)), np.maximum(high, close_cells.max(axis=0))
    # A fall that may be abrupt, or a kink: up to the neighbor, which is lower itself, the surface is not known.
    further = [(drop.axis, place) for drop in cells.drops for place in (drop.low, drop.high)] + cells.kinks()
    first, last = cells.logs.min(axis=0) + 2.1 * surface.steps, cells.logs.max(axis=0) - 2.1 * surface.steps
    for axis, place in further:
        low[axis] = min(low[axis], max(place, first[axis]))
        high[axis] = max(high[axis], min(place, last[axis]))
    for axis, place in cells.around_rivals():
        low[axis], high[axis] = min(low[axis], place), max(high[axis], place)
    return (low, high), surface.mesh[surface.top], float(surface.mean[surface.top])


def _likely(cells: Cells, surface: Surface) -> Floats:
    """Return the close cells [., D], without those at an end that the surface excludes, if it fits all around them."""
    if cells.drops:
        return cells.places[cells.close_cells]
    ends = np.stack([cells.logs.min(axis=0), cells.logs.max(axis=0)], axis=1)  # [D, 2]
    excluded = (cells.places[:, :, None] == ends) & (surface.end_p() < _EXCLUDED)  # [C, D, 2]
    bends = any(cells.bends_at_top(axis) for axis in range(len(ends)))
    level = _EXCLUDED / 5 if bends else 2 * _EXCLUDED
    is_out = [bool(excluded[cell].any()) and cells.is_below(cell, level) for cell in cells.close_cells]
    return np.asarray(cells.places[[cell for cell, out in zip(cells.close_cells, is_out, strict=True) if not out]])


# --- words ------------------------------------------------------------------------------------------------------------


def _axis(
    name: str, best: float, low: float, high: float, ends: tuple[float, float], step: float, *, is_at: Floats
) -> AxisOptimum:
    """Return the optimum of an axis; the region is widened by one mesh step, the resolution."""
    low, high = max(ends[0], min(low, best) - step), min(ends[1], max(high, best) + step)
    sides: tuple[tuple[End, bool], ...] = (("low", low <= ends[0]), ("high", high >= ends[1]))
    reaches = tuple(end for end, there in sides if there)
    return AxisOptimum(
        name=name,
        best=float(2**best),
        low=float(2**low),
        high=float(2**high),
        at_edge="low" if is_at[0] else "high" if is_at[1] else None,
        reaches=reaches,
    )


def _place(cells: Cells, cell: int, names: Sequence[str]) -> str:
    return ", ".join(f"{name}={2**at:.6g}" for name, at in zip(names, cells.places[cell].tolist(), strict=True))


def _verdict(
    axes: Sequence[AxisOptimum],
    p: float,
    *,
    finer: Sequence[str],
    ridge: Ridge | None,
    flats: Sequence[Flat],
    peaks: Sequence[str],
) -> tuple[Kind, str]:
    """Return the first verdict that holds, and why."""
    advice = f"the grid is too coarse here: try --grid {' --grid '.join(finer)}" if finer else ""
    if ridge is not None:
        return "ridge", "; ".join(filter(None, (ridge.why, advice)))
    if finer:
        return "coarse", f"between neighboring settings the results fall abruptly; {advice}"
    if len(peaks) > 1:
        return "undecided", f"several regions are alike: near {'; near '.join(peaks)}; add settings around each"
    if p < _EXCLUDED and not any(axis.reaches for axis in axes):
        return "interior", f"the middle beats both ends of every axis (p = {p:.2g})"
    if flats:
        left = [axis for axis in axes if axis.name not in {flat.name for flat in flats}]
        return "plateau", "; ".join(filter(None, (*(flat.why for flat in flats), _elsewhere(left))))
    edge = _edge(axes)
    if edge:
        return "edge", _with_flat(edge, axes)
    if not any(axis.reaches for axis in axes):
        return "undecided", f"the middle is not shown to beat the ends (p = {p:.2g}); add seeds"
    return "undecided", _with_flat(_inside(axes), axes)


def _elsewhere(axes: Sequence[AxisOptimum]) -> str:
    """Return what is known along the axes without a plateau."""
    return _with_flat(_edge(axes) or _inside(axes), axes)


def _edge(axes: Sequence[AxisOptimum]) -> str:
    certain = [f"{axis.name} at its {axis.end} end" for axis in axes if axis.end and axis.at_edge]
    if certain:
        return f"the best lies at the edge of the grid ({', '.join(certain)}); extend it there"
    possible = [f"{axis.name} at its {axis.end} end" for axis in axes if axis.end]
    if possible:
        return f"the best may lie at the edge of the grid ({', '.join(possible)}); extend it there, or add seeds"
    return ""


def _inside(axes: Sequence[AxisOptimum]) -> str:
    inside = [axis.name for axis in axes if not axis.reaches]
    return f"along {' and '.join(inside)} the best lies inside the grid" if inside else ""


def _with_flat(found: str, axes: Sequence[AxisOptimum]) -> str:
    """Return what was found, and the axes along which nothing was."""
    flat = " and ".join(axis.name for axis in axes if axis.is_flat)
    return "; ".join(filter(None, (found, flat and f"along {flat} these seeds show no difference from end to end")))


def _check(logs: Floats, values: Floats, names: Sequence[str]) -> None:
    if not np.isfinite(logs).all():
        raise ValueError("a response surface in log space needs settings above 0")
    if not np.isfinite(values).all():
        raise ValueError(f"{np.count_nonzero(~np.isfinite(values))} results are NaN or infinite; leave them out")
    for d, name in enumerate(names):
        levels = len(np.unique(logs[:, d]))
        if levels < _LEVELS:
            raise ValueError(f"{name} has {levels} values, a surface needs at least {_LEVELS}; add some to --grid")
    needed = 1 + 2 * len(names) + math.comb(len(names), 2)
    needed += (
        0 if len(values) > len(np.unique(logs, axis=0)) else _LEVELS
    )  # without repeats, the noise is estimated from the residual
    if len(values) <= needed:
        raise ValueError(
            f"{len(values)} results are too few for a surface, which needs more than {needed}; add seeds or values"
        )
