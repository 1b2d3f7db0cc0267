"""The optimum of a response surface in log space, how certain it is, and where the grid cannot tell.

    N results, C cells (settings), D axes, B simulated surfaces

Surfaces that agree with the results (a Gaussian process of scikit-learn, simulated: a parametric bootstrap) and the
settings that do not differ from the best one (`cells`) give a region for the optimum, simultaneous over the axes. The
verdict is the first that holds:

    coarse      next to one of the best settings the means fall abruptly: a cliff, or a peak narrower than the grid
    undecided   several regions are alike: between settings another peak may be higher than the best setting
    interior    the region reaches no end, and the middle beats both ends of every axis (intersection-union test)
    edge        the region reaches one end of an axis and not the other
    undecided   anything else; along an axis on which the region reaches both ends, nothing was found
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from query_mutator.lab.sweep.cells import CONFIDENCE, Cells, finer_grid
from query_mutator.stats.intervals import Floats

__all__ = ["AxisOptimum", "Optimum", "find_optimum"]

End = Literal["low", "high"]
Kind = Literal["interior", "edge", "undecided", "coarse"]

_EXCLUDED = (1 - CONFIDENCE) / 2  # p value that excludes an end; half, because the same results chose the optimum
_LEVELS = 3  # values per axis that a quadratic needs
SURFACES = 800
MESH_POINTS = 500
MOST_AXES = 5  # of which a mesh has five points each
_WIDE = 10.0  # prior variance of the quadratic, in units of that of the means; axes run from -1 to 1
_SIZES = (0.1, 1.0)  # variance of the remainder, in the same unit
_LENGTHS = (0.25, 0.4, 0.8, 1.6, 3.2, 6.4)  # of the remainder; the grid does not resolve a shorter one
_PRIOR = np.tile(np.square(_LENGTHS), len(_SIZES))  # of each size and length: most curves are smooth
_LEAST_NOISE = 1e-6  # keeps the equations solvable


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
    p = float(surface.end_p().max())
    peaks = tuple(_place(cells, cell, names) for cell in (cells.best, *cells.rivals))
    kind, why = _verdict(axes, p, finer=finer, peaks=peaks)
    return Optimum(
        kind=kind,
        axes=axes,
        predicted=scale * predicted,
        p=p,
        confidence=CONFIDENCE,
        why=why,
        finer=finer,
    )


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
    # A fall that may be abrupt: up to the neighbor, which is lower itself, the surface is not known.
    further = [(drop.axis, place) for drop in cells.drops for place in (drop.low, drop.high)]
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


# --- surfaces ---------------------------------------------------------------------------------------------------------


class Surface:
    """Surfaces over a mesh, conditioned on the results: their mean [M], and B simulated ones [M, B]."""

    mean: Floats
    simulated: Floats

    def __init__(self, cells: Cells, rng: np.random.Generator) -> None:
        low, high = cells.logs.min(axis=0), cells.logs.max(axis=0)
        self.mesh = _mesh(low, high)
        center, scale = float(cells.means.mean()), float(cells.means.std()) or 1.0
        places, mesh = (2 * (at - low) / (high - low) - 1 for at in (cells.places, self.mesh))
        means = (cells.means - center) / scale
        noise = cells.variance / scale**2 if cells.degrees else _residual(places, means)
        processes = _processes(places, means, np.maximum(noise / cells.count, _LEAST_NOISE))
        evidence = np.array([process.log_marginal_likelihood_value_ for process in processes])
        likely = _PRIOR * np.exp(evidence - evidence.max())
        chosen = rng.choice(len(processes), SURFACES, p=likely / likely.sum())
        # The noise is estimated too: Student's t in place of a normal.
        spread = np.sqrt(cells.degrees / rng.chisquare(cells.degrees, SURFACES)) if cells.degrees else np.ones(SURFACES)
        self.mean, self.simulated = np.zeros(len(mesh)), np.empty((len(mesh), SURFACES))
        for number in np.unique(chosen).tolist():
            drawn = np.flatnonzero(chosen == number)
            mean, covariance = processes[number].predict(mesh, return_cov=True)
            root = np.linalg.cholesky(covariance + _LEAST_NOISE * np.eye(len(mesh)))
            deviations = spread[drawn] * (root @ rng.normal(size=(len(mesh), len(drawn))))
            self.mean += (center + scale * mean) * len(drawn) / SURFACES
            self.simulated[:, drawn] = center + scale * (mean[:, None] + deviations)

    @property
    def steps(self) -> Floats:
        """Return the distance of two mesh points along each axis [D]."""
        levels = [np.unique(column) for column in self.mesh.T]
        return np.array([float(of[1] - of[0]) if len(of) > 1 else 0.0 for of in levels])

    @property
    def top(self) -> int:
        """Return the mesh point with the highest mean."""
        return int(np.argmax(self.mean))

    def optima(self) -> Floats:
        """Return the maximum of each simulated surface [B, D]."""
        return np.asarray(self.mesh[np.argmax(self.simulated, axis=0)])

    def end_shares(self) -> Floats:
        """Return the share of surfaces whose maximum lies at the low and at the high end of each axis [D, 2]."""
        ends = np.stack([self.mesh.min(axis=0), self.mesh.max(axis=0)], axis=1)
        return np.asarray((self.optima()[:, :, None] == ends).mean(axis=0))

    def end_p(self) -> Floats:
        """Return the share of surfaces not higher at the top than at the low and high end of each axis [D, 2].

        The place at an end is the best there: along a ridge it is not the one with the other settings of the top.
        """
        found = np.ones((self.mesh.shape[1], 2))
        for d, column in enumerate(self.mesh.T):
            for side, end in enumerate((column.min(), column.max())):
                face = np.flatnonzero(column == end)
                at = face[np.argmax(self.mean[face])]
                hits = int((self.simulated[self.top] <= self.simulated[at]).sum())
                found[d, side] = (hits + 1) / (self.simulated.shape[1] + 1)
        return found


def _processes(places: Floats, means: Floats, noise: Floats) -> list[Any]:
    """Return Gaussian processes of cells' means [C] with noise [C] at places [C, D] from -1 to 1."""
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel, DotProduct

    quadratic = ConstantKernel(_WIDE) * DotProduct(1.0) ** 2
    kernels = [quadratic + ConstantKernel(size) * RBF(length) for size, length in itertools.product(_SIZES, _LENGTHS)]
    return [GaussianProcessRegressor(kernel, alpha=noise, optimizer=None).fit(places, means) for kernel in kernels]


def _residual(places: Floats, means: Floats) -> float:
    """Return the variance that a least-squares quadratic leaves over."""
    pairs = itertools.combinations_with_replacement(places.T, 2)
    terms = np.stack([np.ones(len(places)), *places.T, *(one * other for one, other in pairs)], axis=1)
    rest = means - terms @ np.linalg.lstsq(terms, means, rcond=None)[0]
    return float((rest**2).sum()) / max(1, len(means) - int(np.linalg.matrix_rank(terms)))


def _mesh(low: Floats, high: Floats) -> Floats:
    if len(low) > MOST_AXES:
        raise ValueError(f"the optimum of more than {MOST_AXES} settings is not estimated; vary fewer of them")
    points = 201 if len(low) == 1 else max(5, int(MESH_POINTS ** (1 / len(low))))
    axes = [np.linspace(*ends, points) for ends in zip(low, high, strict=True)]
    return np.stack([axis.ravel() for axis in np.meshgrid(*axes, indexing="ij")], axis=1)


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


def _verdict(axes: Sequence[AxisOptimum], p: float, *, finer: Sequence[str], peaks: Sequence[str]) -> tuple[Kind, str]:
    """Return the first verdict that holds, and why."""
    if finer:
        advice = f"the grid is too coarse here: try --grid {' --grid '.join(finer)}"
        return "coarse", f"between neighboring settings the results fall abruptly; {advice}"
    if len(peaks) > 1:
        return "undecided", f"several regions are alike: near {'; near '.join(peaks)}; add settings around each"
    if p < _EXCLUDED and not any(axis.reaches for axis in axes):
        return "interior", f"the middle beats both ends of every axis (p = {p:.2g})"
    edge = _edge(axes)
    if edge:
        return "edge", _with_flat(edge, axes)
    if not any(axis.reaches for axis in axes):
        return "undecided", f"the middle is not shown to beat the ends (p = {p:.2g}); add seeds"
    inside = [axis.name for axis in axes if not axis.reaches]
    found = f"along {' and '.join(inside)} the best lies inside the grid" if inside else ""
    return "undecided", _with_flat(found, axes)


def _edge(axes: Sequence[AxisOptimum]) -> str:
    certain = [f"{axis.name} at its {axis.end} end" for axis in axes if axis.end and axis.at_edge]
    if certain:
        return f"the best lies at the edge of the grid ({', '.join(certain)}); extend it there"
    possible = [f"{axis.name} at its {axis.end} end" for axis in axes if axis.end]
    if possible:
        return f"the best may lie at the edge of the grid ({', '.join(possible)}); extend it there, or add seeds"
    return ""


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
