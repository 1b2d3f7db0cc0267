"""The optimum of a response surface in log space, how certain it is, and where the grid cannot tell.

    N results, C cells (settings), D axes, B simulated surfaces; places are log2 of the settings, higher means better

Surfaces that agree with the results (a Gaussian process of scikit-learn, simulated: a parametric bootstrap) and the
settings that do not differ from the best one give a region for the optimum, simultaneous over the axes. A process
alone, which smooths a cliff away, is right about 81 % of 34 surfaces; with the tests of cells about 99 % (docs/log.md).
The verdict is the first that holds:

    coarse      next to one of the best settings the means fall abruptly: a cliff, or a peak narrower than the grid
    undecided   several regions are equally good: between settings another peak may be higher than the best setting
    interior    the region reaches no end, and the middle beats both ends of every axis (intersection-union test)
    edge        the region reaches one end of an axis and not the other
    undecided   anything else; along an axis on which the region reaches both ends, nothing was found
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from query_mutator.stats import Floats, student_t

__all__ = ["CONFIDENCE", "AxisOptimum", "Cells", "Optimum", "find_optimum", "finer_grid"]

CONFIDENCE = 0.95

_SMOOTH = 0.5  # a bell that is as wide as the grid's steps continues to fall at half the slope or more
_ABRUPT = 1 / 3  # below this share it is narrower than the grid
_STEEPER = 2.5  # the last drop against the steepest elsewhere; a parabola's is at most twice as steep
_FAR_STEEPER = 3.0
_MATERIAL = 0.1  # of the range of all means: a smaller fall is not a cliff
_STEEP_TOO = 0.25  # of the abrupt fall
_HIGHER = 2.0  # times the rise of a bell between cells: how far a peak there may rise above them
_BENT = 0.5  # of the bend at the top: how much a smooth curve bends next to it
_BETWEEN = 3  # settings to try between two that are neighbors


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """A fall from one of the best cells to its neighbor that the slopes elsewhere do not announce."""

    axis: int
    start: float
    end: float
    low: float  # the cell's neighbors on both sides
    high: float
    also: tuple[float, ...]  # the other neighbor, if as good or the fall to it steep: a peak may lie on either side
    is_certain: bool


class Cells:
    """Means of the settings, and the noise of the seeds within them (0 degrees of freedom without repeats)."""

    def __init__(self, logs: Floats, values: Floats) -> None:
        self.logs = logs
        self.places, cell = np.unique(logs, axis=0, return_inverse=True)
        cell = cell.ravel()
        self.count = np.bincount(cell).astype(np.float64)
        self.means: Floats = np.bincount(cell, values) / self.count
        self.degrees = len(values) - len(self.places)
        within = float(((values - self.means[cell]) ** 2).sum())
        self.variance = within / self.degrees if self.degrees else 0.0
        self.best = int(np.argmax(self.means))

    @cached_property
    def close_cells(self) -> list[int]:
        """Return the cells whose mean is not significantly below the best one (t tests, Bonferroni)."""
        if not self.degrees:
            return [self.best]
        far = self._t(len(self.places) - 1)
        error = np.sqrt(self.variance * (1 / self.count + 1 / self.count[self.best]))
        return [int(at) for at in np.flatnonzero(self.means[self.best] - self.means <= far * error)]

    @cached_property
    def drops(self) -> list[Drop]:
        """Return the abrupt falls next to the close cells, where seeds show the noise."""
        sides = [one for one in self._sides() if self.degrees and not set(one[1][1:3]) & set(self.close_cells)]
        far = self._t(len(sides))
        return [drop for axis, ladder in sides if (drop := self._drop(axis, ladder, far)) is not None]

    def _drop(self, axis: int, ladder: list[int], far: float) -> Drop | None:
        """Return the fall at the start of a ladder if it is abrupt; it is certain at `far` standard errors."""
        contrasts = self._lack_of_fit(axis, ladder)
        if contrasts is None or self._estimate(contrasts[0])[0] <= 0:
            return None
        value, error = self._estimate(contrasts[1])
        is_certain = value > far * error and self._is_seen(ladder[0], ladder[1])
        is_certain &= len(ladder) > 2 or ladder[0] == self.best  # a rival on a slope is not a cliff's edge
        fall = self._estimate(self._slope(axis, *ladder[:2]))[0]
        line = self._line(ladder[0], axis)
        around = [cell for cell in _around(line, ladder[0]) if cell != ladder[0]]
        other = [cell for cell in around if cell != ladder[1]]
        falls = [self._estimate(self._slope(axis, ladder[0], cell))[0] for cell in other]
        also = [c for c, its in zip(other, falls, strict=True) if c in self.close_cells or its > _STEEP_TOO * fall]
        places = [float(place) for place in self.places[:, axis]]
        return Drop(
            axis=axis,
            start=places[ladder[0]],
            end=places[ladder[1]],
            low=min(places[cell] for cell in around),
            high=max(places[cell] for cell in around),
            also=tuple(places[cell] for cell in also),
            is_certain=is_certain,
        )

    def kinks(self) -> list[tuple[int, float]]:
        """Return axis and place of how far from a rival the peak of a concave curve may lie, where it bends at the top.

        The chord beyond the neighbor bounds a concave curve between the two from above.
        """
        found = []
        for axis, ladder in self._sides():
            if len(ladder) > 2 and self.bends_at_top(axis):
                drop, beyond = (self._estimate(self._slope(axis, a, b))[0] for a, b in itertools.pairwise(ladder[:3]))
                start, end = (float(self.places[at, axis]) for at in ladder[:2])
                if 0 < drop < beyond:
                    found.append((axis, start + (end - start) * (1 - drop / beyond)))
        return found

    def is_below(self, cell: int, p: float) -> bool:
        """Return whether a cell is below the best one by a t test at level `p`."""
        if cell == self.best:
            return False
        value, error = self._estimate({self.best: 1.0, cell: -1.0})
        return bool(self.degrees) and value > student_t(self.degrees, level=1 - 2 * p) * error

    def bracket(self) -> tuple[Floats, Floats]:
        """Return the box [D], [D] of the close cells and their neighbors, which holds a single peak of any form."""
        low, high = self.places[self.close_cells].min(axis=0), self.places[self.close_cells].max(axis=0)
        for axis, ladder in self._sides():
            at = self.places[ladder[1], axis]
            low[axis], high[axis] = min(low[axis], at), max(high[axis], at)
        return low, high

    @cached_property
    def rivals(self) -> list[int]:
        """Return the tops of other peaks that may be higher between settings than the best mean, though not at one.

        A bell through such a cell and its neighbors estimates the peak. Only a full grid shows its neighbors.
        """
        levels = [np.unique(column, return_inverse=True) for column in self.places.T]
        if not self.degrees or len(self.places) != math.prod(len(of) for of, _ in levels):
            return []
        ranks = np.stack([rank.ravel() for _, rank in levels], axis=1)
        is_far = np.abs(ranks - ranks[self.best]).max(axis=1) > 1
        far = [cell for cell in np.flatnonzero(is_far).tolist() if cell not in self.close_cells]
        return [cell for cell in far if self._is_top(cell) and self._may_be_best(cell)]

    def around_rivals(self) -> list[tuple[int, float]]:
        """Return axis and place of the rivals and their neighbors, between which their peaks lie."""
        lines = [(axis, line, at) for at in self.rivals for axis, line in enumerate(self._lines(at))]
        return [(axis, float(self.places[cell, axis])) for axis, line, at in lines for cell in _around(line, at)]

    def _lines(self, cell: int) -> list[list[int]]:
        return [self._line(cell, axis) for axis in range(self.places.shape[1])]

    def _is_top(self, cell: int) -> bool:
        return all(self.means[cell] >= self.means[_around(line, cell)].max() for line in self._lines(cell))

    def _may_be_best(self, cell: int) -> bool:
        base = float(self.means.min())
        logs = np.log(np.maximum(self.means - base, max(self.variance**0.5, np.finfo(float).tiny)))
        rise = sum(self._rise_of_bell(cell, axis, line, logs) for axis, line in enumerate(self._lines(cell)))
        height = (float(self.means[cell]) - base) * (1 + _HIGHER * math.expm1(rise))
        return height >= float(self.means[self.best]) - base

    def _rise_of_bell(self, cell: int, axis: int, line: list[int], logs: Floats) -> float:
        """Return how far a bell through a cell of a line and two next to it rises above it, as a logarithm."""
        start = min(max(line.index(cell) - 1, 0), len(line) - 3)
        three, ends = line[start : start + 3], self.places[_around(line, cell), axis]
        curve = np.polyfit(self.places[three, axis], logs[three], 2)
        if curve[0] >= 0:
            return 0.0
        top = np.clip(-curve[1] / (2 * curve[0]), ends.min(), ends.max())
        return max(0.0, float(np.polyval(curve, top) - logs[cell]))

    def _sides(self) -> Iterator[tuple[int, list[int]]]:
        """Yield axis, and the cells from each rival to an end of that axis, all else equal."""
        for rival in self.close_cells:
            for axis in range(self.places.shape[1]):
                line = self._line(rival, axis)
                at = line.index(rival)
                for ladder in (line[at:], line[at::-1]):
                    if len(ladder) > 1:
                        yield axis, ladder

    def _line(self, cell: int, axis: int) -> list[int]:
        """Return the cells that differ from a cell along one axis only, and the cell, in order."""
        others = np.delete(self.places, axis, axis=1)
        line = np.flatnonzero((others == others[cell]).all(axis=1))
        return [int(at) for at in line[np.argsort(self.places[line, axis])]]

    def _is_seen(self, a: int, b: int) -> bool:
        """Return whether the fall from one cell to another is large, and significant among all pairs."""
        value, error = self._estimate({a: 1.0, b: -1.0})
        far = self._t(len(self.places) * (len(self.places) - 1) // 2)
        return value > max(_MATERIAL * float(np.ptp(self.means)), far * error)

    def bends_at_top(self, axis: int) -> bool:
        """Return whether the line through the best cell bends there and at its better neighbor only."""
        line = self._line(self.best, axis)
        at, f, top = self.places[line, axis], self.means[line], line.index(self.best)
        if len(line) < 4:
            return False
        slopes = np.diff(f) / np.diff(at)
        bends = -np.diff(slopes) / ((at[2:] - at[:-2]) / 2)  # of the cells 1 to len - 2
        second = max((cell for cell in (top - 1, top + 1) if 0 <= cell < len(line)), key=lambda cell: float(f[cell]))
        low, high = min(top, second), max(top, second)
        inner = [bends[cell - 1] for cell in (low, high) if 0 < cell < len(line) - 1]
        outer = [bends[cell - 1] for cell in (low - 1, high + 1) if 0 < cell < len(line) - 1]
        return bool(inner and outer) and bool(np.mean(outer) < _BENT * np.mean(inner))

    def _lack_of_fit(self, axis: int, ladder: list[int]) -> tuple[Mapping[int, float], Mapping[int, float]] | None:
        """Return two contrasts, each above 0 for a drop that is abrupt: by the point estimate, and to be tested."""
        drop = self._slope(axis, ladder[0], ladder[1])
        if self._estimate(drop)[0] <= 0:
            return None
        if len(ladder) > 2:
            beyond = self._slope(axis, ladder[1], ladder[2])
            return _sum(drop, _SMOOTH, beyond, -1.0), _sum(drop, _ABRUPT, beyond, -1.0)
        line = [cell for cell in self._line(ladder[0], axis) if cell != ladder[1]]
        pairs = list(zip(line, line[2:], strict=False))  # over two steps: one is level where the best is within it
        if not pairs:
            return None
        steepest = max((self._slope(axis, *pair) for pair in pairs), key=lambda of: abs(self._estimate(of)[0]))
        sign = -1.0 if self._estimate(steepest)[0] > 0 else 1.0
        return _sum(drop, 1 / _STEEPER, steepest, sign), _sum(drop, 1 / _FAR_STEEPER, steepest, sign)

    def _slope(self, axis: int, a: int, b: int) -> dict[int, float]:
        """Return the fall from one cell to the next, for each octave, as weights of their means."""
        octaves = abs(float(self.places[a, axis] - self.places[b, axis]))
        return {a: 1 / octaves, b: -1 / octaves}

    def _estimate(self, weights: Mapping[int, float]) -> tuple[float, float]:
        """Return a contrast of the means and its standard error."""
        value = sum(weight * float(self.means[cell]) for cell, weight in weights.items())
        variance = sum(weight**2 / float(self.count[cell]) for cell, weight in weights.items()) * self.variance
        return value, variance**0.5

    def _t(self, tests: int) -> float:
        """Return the one-sided quantile of Student's t, corrected for a number of tests."""
        return student_t(self.degrees, level=1 - 2 * (1 - CONFIDENCE) / max(1, tests))


def _sum(a: Mapping[int, float], times: float, b: Mapping[int, float], and_times: float) -> dict[int, float]:
    return {cell: times * a.get(cell, 0.0) + and_times * b.get(cell, 0.0) for cell in {**a, **b}}


def _around(line: list[int], cell: int) -> list[int]:
    """Return a cell of a line with its neighbors there."""
    at = line.index(cell)
    return line[max(0, at - 1) : at + 2]


def finer_grid(cells: Cells, names: Sequence[str]) -> tuple[str, ...]:
    """Return NAME=VALUE,VALUE for each axis on which the grid is too coarse next to the best settings."""
    found = []
    for axis, name in enumerate(names):
        levels = 2 ** np.unique(cells.places[:, axis])
        is_whole = bool(np.allclose(levels, np.round(levels)))
        values: set[str] = set()
        for drop in cells.drops:
            if drop.axis == axis and drop.is_certain:
                for end in (drop.end, *drop.also):
                    values |= _between(drop.start, end, is_whole=is_whole)
        if values:
            found.append(f"{name}={','.join(sorted(values, key=float))}")
    return tuple(found)


def _between(a: float, b: float, *, is_whole: bool) -> set[str]:
    """Return two neighbors and settings between them; empty where there are none, as between 2 and 3."""
    places = 2 ** np.linspace(a, b, _BETWEEN + 2)
    values = {str(round(at)) if is_whole else f"{at:.4g}" for at in places.tolist()}
    return values if len(values) > 2 else set()


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
