"""Optima that are not one place: a ridge along which two settings trade off, a plateau, a peak between two levels."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from query_mutator.lab.sweep.cells import CONFIDENCE, Cells, End
from query_mutator.lab.sweep.kriging import Surface
from query_mutator.stats.intervals import Floats

__all__ = ["Flat", "Ridge", "find_flats", "find_ridge", "finer_grid"]

_EXPONENTS = {
    1.0: "{} x {}",
    -1.0: "{} / {}",
    0.5: "{} x sqrt({})",
    -0.5: "{} / sqrt({})",
    2.0: "{} x {}^2",
    -2.0: "{} / {}^2",
}
_ACROSS = 0.5  # of the width of a region without a direction: how wide a ridge may be
_ALONG = 0.3  # of an axis: how long it must be
_PLAINER = 0.8  # how much narrower a square or a root must be than the product
_ROUNDING = 1e-9  # of powers of logarithms
_BETWEEN = 3  # settings to try between two that are neighbors


@dataclass(frozen=True, slots=True, kw_only=True)
class Ridge:
    """The best settings lie where first * second ** exponent is about `best`, within `low` and `high`."""

    first: str
    second: str
    exponent: float
    best: float
    low: float
    high: float

    @property
    def formula(self) -> str:
        """Return what is constant along the ridge."""
        return _EXPONENTS[self.exponent].format(self.first, self.second)

    def holds(self, setting: Mapping[str, int | float | str]) -> bool:
        """Return whether a setting lies on the ridge."""
        at = float(setting[self.first]) * float(setting[self.second]) ** self.exponent
        return bool(self.low <= at <= self.high)

    @property
    def why(self) -> str:
        """Return what the ridge means for a choice."""
        way = "lower" if self.exponent > 0 else "raise"
        return (
            f"{self.first} and {self.second} trade off against each other: where you raise one, {way} the other to "
            f"keep {self.formula}; these seeds show no best place along it"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Flat:
    """Settings of an axis from `smallest` to `largest` that are as good, up to one end of the grid."""

    name: str
    smallest: float
    largest: float
    end: End
    loss: float  # the upper 95 % limit of what the smallest costs

    def holds(self, value: int | float | str) -> bool:
        """Return whether a level lies on the plateau."""
        return self.smallest * (1 - _ROUNDING) <= float(value) <= self.largest * (1 + _ROUNDING)

    @property
    def why(self) -> str:
        """Return what the plateau means for a choice."""
        return (
            f"from {self.smallest:.6g} to {self.largest:.6g}, the {self.end} end of the grid, {self.name} makes no "
            f"difference; the smallest that is as good, {self.smallest:.6g}, costs at most {self.loss:.2g}"
        )


def find_ridge(cells: Cells, surface: Surface, reaches: Sequence[bool], names: Sequence[str]) -> Ridge | None:
    """Return the ridge across two axes whose ends the region reaches; None where there is none."""
    found: list[tuple[float, Ridge]] = []
    for pair in itertools.combinations(range(len(names)), 2):
        ridge = _ridge_of(cells, surface, pair, names) if reaches[pair[0]] or reaches[pair[1]] else None
        found += [ridge] if ridge else []
    return min(found, key=lambda of: of[0])[1] if found else None


def find_flats(
    cells: Cells, reaches: Sequence[Sequence[End]], names: Sequence[str], *, scale: float
) -> tuple[Flat, ...]:
    """Return the plateaus up to the ends that the region reaches."""
    found = []
    for axis, ends in enumerate(reaches):
        for end in ends if len(ends) == 1 else ():
            if (plateau := cells.plateau(axis, end)) is not None:
                low, high, loss = plateau
                found.append(Flat(name=names[axis], smallest=2**low, largest=2**high, end=end, loss=abs(scale) * loss))
    return tuple(found)


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


def _ridge_of(
    cells: Cells, surface: Surface, pair: tuple[int, int], names: Sequence[str]
) -> tuple[float, Ridge] | None:
    """Return the width of a ridge across two axes, relative to that of a region without a direction, and the ridge."""
    optima, close_cells = surface.optima()[:, pair], cells.places[cells.close_cells][:, pair]
    widths = np.ptp(_quantiles(np.concatenate([optima, close_cells])), axis=0)
    if (widths < _ALONG * np.ptp(cells.places[:, pair], axis=0)).any():
        return None
    shares = {k: float(np.ptp(_quantiles(_across(optima, k))) / (widths @ [1, abs(k)])) for k in _EXPONENTS}
    exponent = min(shares, key=lambda k: shares[k] / (1 if abs(k) == 1 else _PLAINER))
    across = np.concatenate([_across(close_cells, exponent), _quantiles(_across(optima, exponent))])
    step = float(surface.steps[list(pair)] @ [1, abs(exponent)]) / 2
    low, high = across.min() - step, across.max() + step
    share = (across.max() - across.min()) / float(widths @ [1, abs(exponent)])
    if share > _ACROSS:
        return None
    best = float(np.median(_across(optima, exponent)))
    first, second = (names[d] for d in pair)
    ridge = Ridge(
        first=first,
        second=second,
        exponent=exponent,
        best=float(2**best),
        low=float(2**low),
        high=float(2**high),
    )
    return share, ridge


def _across(places: Floats, exponent: float) -> Floats:
    return np.asarray(places[:, 0] + exponent * places[:, 1])


def _quantiles(values: Floats) -> Floats:
    tail = (1 - CONFIDENCE) / 2
    return np.asarray(np.quantile(values, [tail, 1 - tail], axis=0))
