"""The settings of a sweep with their means, and what those show without a fitted surface: close cells, and drops.

N results, C cells (settings), D axes; places are log2 of the settings, a higher mean is better

A Gaussian process alone, which smooths a cliff away, is right about 81 % of 34 surfaces; with these tests about 99 %
(docs/log.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from query_mutator.stats.intervals import Floats, student_t

__all__ = ["CONFIDENCE", "Cells", "finer_grid"]

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
