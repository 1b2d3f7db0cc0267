"""Surfaces in log space that agree with the results: a Gaussian process of scikit-learn, and simulations of it.

    C cells (settings), D axes, M mesh points over the grid, B simulated surfaces

The process is a quadratic with a wide prior plus a squared-exponential remainder of several sizes and lengths, each as
often as the cells' means make it likely: the likeliest alone misses an optimum between cells. The noise is known from
the spread of the seeds within cells.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from query_mutator.lab.sweep.cells import Cells
from query_mutator.stats.intervals import Floats

__all__ = ["Surface"]

SURFACES = 800
MESH_POINTS = 500
MOST_AXES = 5  # of which a mesh has five points each
_WIDE = 10.0  # prior variance of the quadratic, in units of that of the means; axes run from -1 to 1
_SIZES = (0.1, 1.0)  # variance of the remainder, in the same unit
_LENGTHS = (0.25, 0.4, 0.8, 1.6, 3.2, 6.4)  # of the remainder; the grid does not resolve a shorter one
_PRIOR = np.tile(np.square(_LENGTHS), len(_SIZES))  # of each size and length: most curves are smooth
_LEAST_NOISE = 1e-6  # keeps the equations solvable


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
