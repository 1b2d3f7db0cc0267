"""A response surface in log space, the location of its optimum, and how certain that is.

    N results, C cells (settings), D axes, M mesh points over the grid, B simulated surfaces, P terms of the trend

The surface is a quadratic in log2 of each axis plus a Gaussian process for the residual. The roughness of the process
is estimated from the cells' means by restricted likelihood, the noise from the spread of the seeds within cells.
Surfaces simulated under this model (parametric bootstrap) give a region for the optimum, simultaneous over the axes,
and the p value of "the middle beats this end" for both ends of every axis. An optimum is interior only when the largest
of these is small (intersection-union test), an edge optimum when the region reaches one end of an axis and not the
other; along an axis on which it reaches both ends, nothing was found.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from query_mutator.stats.intervals import Floats, student_t

__all__ = ["AxisOptimum", "Optimum", "find_optimum", "pareto_front"]

Kind = Literal["interior", "edge", "undecided"]

CONFIDENCE = 0.95
SURFACES = 800
MESH_POINTS = 500
_LENGTHS = (0.2, 0.4)  # correlation lengths of the process, in widths of the grid
_ROUGHNESS = (1.0, 2.0, 4.0)  # its standard deviation, in units of the quadratic's residual
_LEVELS = 3  # values per axis that a quadratic needs


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisOptimum:
    """The optimum on one axis, in the unit of the axis."""

    name: str
    best: float
    low: float
    high: float
    at_edge: Literal["", "low", "high"]  # the estimate lies at that end of the grid
    reaches: tuple[str, ...]  # ends that the region reaches

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


def find_optimum(x: Floats, y: Floats, *, names: Sequence[str], maximize: bool = True) -> Optimum:
    """Return the optimum of `y` [N] over settings `x` [N, D], all above 0; ValueError when the grid is too small."""
    sign = 1.0 if maximize else -1.0
    logs, values = np.log2(np.asarray(x, dtype=np.float64)), sign * np.asarray(y, dtype=np.float64)
    _check(logs, values, names)
    surface = _Surface(logs, values, np.random.default_rng(0))
    best, tail = surface.mesh[surface.top], (1 - CONFIDENCE) / 2 / logs.shape[1]
    low, high = np.quantile(surface.optima(), [tail, 1 - tail], axis=0)
    rivals = _rivals_of_the_best(logs, values)  # independent of the fitted surface
    low, high = np.minimum(low, rivals.min(axis=0)), np.maximum(high, rivals.max(axis=0))
    ends = logs.min(axis=0), logs.max(axis=0)
    axes = tuple(
        _axis(name, best[d], low[d], high[d], (ends[0][d], ends[1][d]), _step(surface.mesh[:, d]))
        for d, name in enumerate(names)
    )
    p = surface.interior_p()
    kind, why = _kind(axes, p)
    predicted = sign * float(surface.mean[surface.top])
    return Optimum(kind=kind, axes=axes, predicted=predicted, p=p, confidence=CONFIDENCE, why=why)


def pareto_front(performance: Sequence[float], throughput: Sequence[float]) -> list[int]:
    """Return the settings that no other beats in both, the fastest last; higher is better in both."""
    points = list(enumerate(zip(performance, throughput, strict=True)))
    front = [
        at
        for at, (p, t) in points
        if not any(q >= p and u >= t and (q > p or u > t) for other, (q, u) in points if other != at)
    ]
    return sorted(front, key=lambda at: throughput[at])


def _rivals_of_the_best(logs: Floats, values: Floats) -> Floats:
    """Return the settings [., D] whose mean is not significantly below the best one (t tests, Bonferroni)."""
    settings, cell = np.unique(logs, axis=0, return_inverse=True)
    count = np.bincount(cell.ravel()).astype(np.float64)
    means = np.bincount(cell.ravel(), values) / count
    best, degrees = int(np.argmax(means)), len(values) - len(settings)
    if not degrees:
        return np.asarray(settings[[best]])
    variance = float(((values - means[cell.ravel()]) ** 2).sum() / degrees)
    far = student_t(degrees, level=1 - 2 * (1 - CONFIDENCE) / (len(settings) - 1))  # one-sided
    return np.asarray(settings[means[best] - means <= far * np.sqrt(variance * (1 / count + 1 / count[best]))])


# --- the surface ------------------------------------------------------------------------------------------------------


class _Surface:
    """Surfaces over a mesh, conditioned on the results: their mean [M], and B simulated ones [M, B]."""

    def __init__(self, logs: Floats, values: Floats, rng: np.random.Generator) -> None:
        self.mesh = _mesh(logs)
        settings, cell = np.unique(logs, axis=0, return_inverse=True)
        count = np.bincount(cell.ravel()).astype(np.float64)
        means = np.bincount(cell.ravel(), values) / count
        trend, left_over = _trend(settings, logs), values - means[cell.ravel()]
        # Roughness: what a least-squares quadratic through the means leaves over.
        rough = means - trend @ np.linalg.lstsq(trend, means, rcond=None)[0]
        degrees = len(values) - len(settings)
        free = max(1, len(settings) - np.linalg.matrix_rank(trend))
        # Noise: the variance within cells; without repeats, that of the residual.
        noise = float((left_over**2).sum() / degrees) if degrees else float((rough**2).sum() / free)
        noise = max(noise, 1e-12 * float(values.var()) + 1e-300)
        size = math.sqrt(float((rough**2).sum()) / free)
        self._models = [
            _Process(settings, self.mesh, trend, _trend(self.mesh, logs), length, amplitude, noise / count, means)
            for amplitude in dict.fromkeys(share * size for share in _ROUGHNESS)
            for length in (_LENGTHS if amplitude else _LENGTHS[:1])
        ]
        self._simulate(_prior(settings.tobytes(), settings.shape, self.mesh.tobytes(), self.mesh.shape), rng, degrees)

    @property
    def top(self) -> int:
        """Return the mesh point with the highest mean."""
        return int(np.argmax(self.mean))

    def optima(self) -> Floats:
        """Return the maximum of each simulated surface [B, D]."""
        return np.asarray(self.mesh[np.argmax(self.simulated, axis=0)])

    def interior_p(self) -> float:
        """Return the share of surfaces not higher at the top than at an end of an axis, maximum over the ends."""
        top, largest = self.mesh[self.top], 0.0
        for d in range(self.mesh.shape[1]):
            for end in (self.mesh[:, d].min(), self.mesh[:, d].max()):
                there = top.copy()
                there[d] = end
                at = int(np.argmin(((self.mesh - there) ** 2).sum(axis=1)))
                hits = int((self.simulated[self.top] <= self.simulated[at]).sum())
                largest = max(largest, (hits + 1) / (self.simulated.shape[1] + 1))
        return largest

    def _simulate(self, prior: dict[float, Floats], rng: np.random.Generator, degrees: int) -> None:
        likelihood = np.array([model.log_likelihood for model in self._models])
        share = np.exp(likelihood - likelihood.max())
        share /= share.sum()
        self.mean = np.asarray(sum(w * model.mean for w, model in zip(share, self._models, strict=True)))
        # Each model simulates surfaces in proportion to its likelihood.
        counts = rng.multinomial(SURFACES, share)
        parts, first = [], 0
        for count, model in zip(counts, self._models, strict=True):
            drawn = prior[model.length][:, first : first + count]
            noise = rng.normal(size=(len(model.noise), count))
            if degrees:  # the noise is estimated too: Student's t in place of a normal
                noise *= np.sqrt(degrees / rng.chisquare(degrees, count))
            parts.append(model.conditioned(drawn, noise))
            first += count
        self.simulated = np.concatenate(parts, axis=1)


class _Process:
    """Universal kriging of cells' means [C] onto the mesh [M], with a flat prior on the trend."""

    def __init__(
        self,
        settings: Floats,
        mesh: Floats,
        trend: Floats,
        mesh_trend: Floats,
        length: float,
        amplitude: float,
        noise: Floats,
        means: Floats,
    ) -> None:
        self.length, self.amplitude, self.noise, self.values = length, amplitude, noise, means
        covariance = amplitude**2 * _kernel(settings, settings, mesh, length) + np.diag(noise)
        inverse = np.linalg.inv(covariance)
        basis = np.linalg.qr(trend)[0][:, : np.linalg.matrix_rank(trend)]
        through = np.linalg.lstsq(trend, basis, rcond=None)[0]  # the basis in terms of the trend
        gram = basis.T @ inverse @ basis
        weights = np.linalg.solve(gram, basis.T @ inverse)  # [P, C]
        near = amplitude**2 * _kernel(mesh, settings, mesh, length) @ inverse
        self._onto_mesh = near + (mesh_trend @ through - near @ basis) @ weights  # [M, C]
        self.mean = np.asarray(self._onto_mesh @ means)
        rest = means - basis @ (weights @ means)
        self.log_likelihood = -0.5 * float(
            np.linalg.slogdet(covariance)[1] + np.linalg.slogdet(gram)[1] + rest @ inverse @ rest
        )

    def conditioned(self, drawn: Floats, noise: Floats) -> Floats:
        """Condition unit surfaces [M + C, B] on the results; return them on the mesh [M, B]."""
        m = len(self.mean)
        seen = self.amplitude * drawn[m:] + np.sqrt(self.noise)[:, None] * noise
        return np.asarray(self.amplitude * drawn[:m] + self._onto_mesh @ (self.values[:, None] - seen))


@lru_cache(maxsize=4)
def _prior(settings: bytes, shape: tuple[int, ...], mesh: bytes, mesh_shape: tuple[int, ...]) -> dict[float, Floats]:
    """Return, by length, unconditional surfaces [M + C, B] of unit size; the same grid gives the same ones."""
    places = np.frombuffer(mesh).reshape(mesh_shape)
    points = np.concatenate([places, np.frombuffer(settings).reshape(shape)])
    rng, found = np.random.default_rng(0), {}
    for length in _LENGTHS:
        values, vectors = np.linalg.eigh(_kernel(points, points, places, length))
        root = vectors * np.sqrt(np.maximum(values, 0))
        found[length] = np.asarray(root @ rng.normal(size=(len(points), SURFACES)))
    return found


def _kernel(a: Floats, b: Floats, mesh: Floats, length: float) -> Floats:
    """Return the squared-exponential correlation [A, B] of places; `length` is in widths of the mesh."""
    width = (mesh.max(axis=0) - mesh.min(axis=0)) * length
    squares = (((a[:, None] - b[None]) / width) ** 2).sum(axis=2)
    return np.asarray(np.exp(-squares / 2))


def _trend(logs: Floats, all_logs: Floats) -> Floats:
    """Return the terms of a quadratic [., P] in centered and scaled logarithms."""
    z = (logs - all_logs.mean(axis=0)) / all_logs.std(axis=0)
    pairs = itertools.combinations_with_replacement(range(z.shape[1]), 2)
    return np.stack([np.ones(len(z)), *z.T, *(z[:, d] * z[:, e] for d, e in pairs)], axis=1)


def _mesh(logs: Floats) -> Floats:
    dims = logs.shape[1]
    points = max(5, int(MESH_POINTS ** (1 / dims))) if dims > 1 else 201
    axes = [np.linspace(logs[:, d].min(), logs[:, d].max(), points) for d in range(dims)]
    return np.stack([grid.ravel() for grid in np.meshgrid(*axes, indexing="ij")], axis=1)


def _step(column: Floats) -> float:
    levels = np.unique(column)
    return float(levels[1] - levels[0]) if len(levels) > 1 else 0.0


# --- words ------------------------------------------------------------------------------------------------------------


def _axis(name: str, best: float, low: float, high: float, ends: tuple[float, float], step: float) -> AxisOptimum:
    """Return the optimum of an axis; the region is widened by one mesh step, the resolution."""
    low, high = max(ends[0], min(low, best) - step), min(ends[1], max(high, best) + step)
    at_edge: Literal["", "low", "high"] = ""
    if best <= ends[0] + step / 2:
        at_edge = "low"
    elif best >= ends[1] - step / 2:
        at_edge = "high"
    reaches = tuple(end for end, there in (("low", low <= ends[0]), ("high", high >= ends[1])) if there)
    return AxisOptimum(
        name=name, best=float(2**best), low=float(2**low), high=float(2**high), at_edge=at_edge, reaches=reaches
    )


def _kind(axes: Sequence[AxisOptimum], p: float) -> tuple[Kind, str]:
    certain = [f"{axis.name} at its {axis.end} end" for axis in axes if axis.end and axis.at_edge]
    if certain:
        edge = f"the best lies at the edge of the grid ({', '.join(certain)}); extend it there"
        return "edge", _with_flat(edge, axes)
    if p < (1 - CONFIDENCE) / 2:  # half, because the same results chose the optimum
        return "interior", f"the middle beats both ends of every axis (p = {p:.2g})"
    possible = [f"{axis.name} at its {axis.end} end" for axis in axes if axis.end]
    if possible:
        edge = f"the best may lie at the edge of the grid ({', '.join(possible)}); extend it there, or add seeds"
        return "edge", _with_flat(edge, axes)
    inside = [axis.name for axis in axes if not axis.reaches]
    if len(inside) == len(axes):
        return "undecided", f"the middle is not shown to beat the ends (p = {p:.2g}); add seeds"
    found = f"along {' and '.join(inside)} the best lies inside the grid" if inside else ""
    return "undecided", _with_flat(found, axes)


def _with_flat(found: str, axes: Sequence[AxisOptimum]) -> str:
    """Return what was found, and the axes along which nothing was."""
    flat = " and ".join(axis.name for axis in axes if axis.is_flat)
    return "; ".join(filter(None, (found, flat and f"along {flat} these seeds show no difference from end to end")))


def _check(logs: Floats, values: Floats, names: Sequence[str]) -> None:
    if not np.isfinite(logs).all():
        raise ValueError("a response surface in log space needs settings above 0")
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
