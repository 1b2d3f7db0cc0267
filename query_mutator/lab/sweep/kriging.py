"""Surfaces in log space that agree with the results: a Gaussian process of scikit-learn, and simulations of it.

    C cells (settings), D axes, M mesh points over the grid, B simulated surfaces

The process is a quadratic with a wide prior plus a squared-exponential remainder, whose size and length follow from the
cells' means by maximum likelihood. The noise is known from the spread of the seeds within cells.
"""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import numpy as np

from query_mutator.lab.sweep.cells import Cells
from query_mutator.stats.intervals import Floats

__all__ = ["Surface"]

SURFACES = 800
MESH_POINTS = 500
_WIDE = 10.0  # prior variance of the quadratic, in units of that of the means; axes run from -1 to 1
_SIZES = (1e-3, 1e3)  # variance of the remainder, in the same unit
_LENGTHS = (0.4, 10.0)  # of the remainder; a shorter one than a fifth of the grid is not resolved by it
_LEAST_NOISE = 1e-8  # keeps the equations solvable


class Surface:
    """Surfaces over a mesh, conditioned on the results: their mean [M], and B simulated ones [M, B]."""

    def __init__(self, cells: Cells, rng: np.random.Generator) -> None:
        low, high = cells.logs.min(axis=0), cells.logs.max(axis=0)
        self.mesh = _mesh(low, high)
        center, scale = float(cells.means.mean()), float(cells.means.std()) or 1.0
        places, mesh = (2 * (at - low) / (high - low) - 1 for at in (cells.places, self.mesh))
        means = (cells.means - center) / scale
        noise = cells.variance / scale**2 if cells.degrees else _residual(places, means)
        process = _process(places, means, np.maximum(noise / cells.count, _LEAST_NOISE))
        mean, covariance = process.predict(mesh, return_cov=True)
        values, vectors = np.linalg.eigh(covariance)
        drawn = vectors @ (np.sqrt(np.maximum(values, 0))[:, None] * rng.normal(size=(len(mesh), SURFACES)))
        if cells.degrees:  # the noise is estimated too: Student's t in place of a normal
            drawn *= np.sqrt(cells.degrees / rng.chisquare(cells.degrees, SURFACES))
        self.mean: Floats = center + scale * mean
        self.simulated: Floats = self.mean[:, None] + scale * drawn

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


def _process(places: Floats, means: Floats, noise: Floats) -> Any:
    """Return a fitted Gaussian process of cells' means [C] with noise [C] at places [C, D] from -1 to 1."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel, DotProduct

    quadratic = ConstantKernel(_WIDE, "fixed") * DotProduct(1.0, "fixed") ** 2
    remainder = ConstantKernel(1.0, _SIZES) * RBF(0.8, _LENGTHS)
    with warnings.catch_warnings(action="ignore", category=ConvergenceWarning):  # a bound is as good an estimate
        return GaussianProcessRegressor(quadratic + remainder, alpha=noise).fit(places, means)


def _residual(places: Floats, means: Floats) -> float:
    """Return the variance that a least-squares quadratic leaves over."""
    pairs = itertools.combinations_with_replacement(places.T, 2)
    terms = np.stack([np.ones(len(places)), *places.T, *(one * other for one, other in pairs)], axis=1)
    rest = means - terms @ np.linalg.lstsq(terms, means, rcond=None)[0]
    return float((rest**2).sum()) / max(1, len(means) - int(np.linalg.matrix_rank(terms)))


def _mesh(low: Floats, high: Floats) -> Floats:
    points = 201 if len(low) == 1 else max(5, int(MESH_POINTS ** (1 / len(low))))
    axes = [np.linspace(*ends, points) for ends in zip(low, high, strict=True)]
    return np.stack([axis.ravel() for axis in np.meshgrid(*axes, indexing="ij")], axis=1)
