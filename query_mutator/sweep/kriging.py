"""Surfaces in log space that agree with the results: a quadratic plus a Gaussian process, and simulations of both.

    N results, C cells (settings), D axes, M mesh points over the grid, B simulated surfaces, P terms of the trend

The surface is a quadratic in log2 of each axis plus a Gaussian process for the residual. The roughness of the process
is estimated from the cells' means by restricted likelihood, the noise from the spread of the seeds within cells.
"""

from __future__ import annotations

import itertools
import math
from functools import lru_cache

import numpy as np

from query_mutator.stats.intervals import Floats
from query_mutator.sweep.cells import Cells

__all__ = ["Surface"]

SURFACES = 800
MESH_POINTS = 500
_LENGTHS = (0.2, 0.4)  # correlation lengths of the process, in widths of the grid
_ROUGHNESS = (1.0, 2.0, 4.0)  # its standard deviation, in units of the quadratic's residual


class Surface:
    """Surfaces over a mesh, conditioned on the results: their mean [M], and B simulated ones [M, B]."""

    def __init__(self, cells: Cells, rng: np.random.Generator) -> None:
        logs, settings, means = cells.logs, cells.places, cells.means
        self.mesh = _mesh(logs)
        trend = _trend(settings, logs)
        # Roughness: what a least-squares quadratic through the means leaves over.
        rough = means - trend @ np.linalg.lstsq(trend, means, rcond=None)[0]
        free = max(1, len(settings) - np.linalg.matrix_rank(trend))
        # Noise: the variance within cells; without repeats, that of the residual.
        noise = cells.variance if cells.degrees else float((rough**2).sum() / free)
        noise = max(noise, 1e-12 * float(means.var()) + 1e-300)
        size = math.sqrt(float((rough**2).sum()) / free)
        self._models = [
            _Process(settings, self.mesh, trend, _trend(self.mesh, logs), length, amplitude, noise / cells.count, means)
            for amplitude in dict.fromkeys(share * size for share in _ROUGHNESS)
            for length in (_LENGTHS if amplitude else _LENGTHS[:1])
        ]
        prior = _prior(settings.tobytes(), settings.shape, self.mesh.tobytes(), self.mesh.shape)
        self._simulate(prior, rng, cells.degrees)

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
