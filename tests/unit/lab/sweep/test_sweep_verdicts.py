"""Verdicts on surfaces that a quadratic does not describe: cliffs, narrow peaks, ridges and plateaus."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from query_mutator.lab.sweep.surface import Optimum, find_optimum
from query_mutator.stats.intervals import Floats

pytestmark = pytest.mark.slow

BATCHES = (64, 128, 256, 512, 1024, 2048, 8192)
FIVE = (64, 128, 256, 512, 1024), (128, 256, 512, 1024, 2048)
Curve = Callable[[Floats], Floats]


def found_on(surface: Curve, *levels: tuple[int, ...], noise: float, seeds: int = 3, count: int = 25) -> list[Optimum]:
    points = np.stack(np.meshgrid(*levels, indexing="ij"), axis=-1).reshape(-1, len(levels))
    x = np.repeat(points, seeds, axis=0).astype(float)
    rng, names = np.random.default_rng(1), ["batch", "speed"][: x.shape[1]]
    truth = surface(np.log2(x))
    return [find_optimum(x, truth + noise * rng.normal(size=len(x)), names=names) for _ in range(count)]


def cliff(at: float) -> Curve:
    return lambda z: np.where(z[:, 0] <= at, 0.4 + 0.05 * (z[:, 0] - 6), 0.1)


def bell(at: float, width: float) -> Curve:
    return lambda z: 0.3 + 0.4 * np.exp(-(((z[:, 0] - at) / width) ** 2) / 2)


def tried(optimum: Optimum) -> list[float]:
    """Return log2 of the values that --grid is to try for the first setting."""
    return [float(np.log2(float(value))) for value in optimum.finer[0].partition("=")[2].split(",")]


def share(found: list[bool]) -> float:
    return float(np.mean(found))


@pytest.mark.parametrize(
    ("surface", "at"),
    [(cliff(9.6), 9.6), (cliff(9.9), 9.9), (cliff(11.8), 11.8), (bell(8.3, 0.25), 8.3), (bell(8.5, 0.4), 8.5)],
)
@pytest.mark.parametrize("seeds", [3, 8])
def test_a_cliff_or_a_narrow_peak_is_held_or_answered_with_values_around_it(
    surface: Curve, at: float, seeds: int
) -> None:
    found = found_on(surface, BATCHES, noise=0.02, seeds=seeds)
    inside = [bool(one.axes[0].low <= 2**at <= one.axes[0].high) for one in found]
    assert share(inside) >= 0.95
    coarse = [one for one in found if one.kind == "coarse"]
    assert len(coarse) >= (0.95 if seeds == 8 else 0.8) * len(found)
    assert all("the grid is too coarse here: try --grid batch=" in one.why for one in coarse)
    assert share([min(tried(one)) < at < max(tried(one)) for one in coarse]) >= 0.95


@pytest.mark.parametrize("noise", [0.01, 0.03, 0.06])
@pytest.mark.parametrize("surface", [bell(8.4, 1.0), bell(8.4, 1.5), lambda z: 0.7 - 0.02 * (z[:, 0] - 9) ** 2])
def test_a_smooth_hill_is_not_called_too_coarse(surface: Curve, noise: float) -> None:
    assert share([bool(one.finer) for one in found_on(surface, BATCHES, noise=noise)]) <= 0.05


@pytest.mark.parametrize(("noise", "seeds"), [(0.03, 3), (0.03, 8)])
def test_noise_alone_is_not_called_too_coarse(noise: float, seeds: int) -> None:
    flat = found_on(lambda z: 0 * z[:, 0], BATCHES, noise=noise, seeds=seeds, count=100)
    assert share([bool(one.finer) for one in flat]) <= 0.05


@pytest.mark.parametrize(
    ("exponent", "at", "words"),
    [
        (1.0, 17.0, "lower the other to keep batch x speed"),
        (1.0, 17.5, "batch x speed"),
        (-1.0, -1.0, "raise the other to keep batch / speed"),
        (0.5, 12.5, "lower the other to keep batch x sqrt(speed)"),
    ],
)
def test_a_diagonal_ridge_is_a_trade_off(exponent: float, at: float, words: str) -> None:
    def ridge(z: Floats) -> Floats:
        return 0.7 - 0.05 * (z[:, 0] + exponent * z[:, 1] - at) ** 2

    found = found_on(ridge, *FIVE, noise=0.02, count=20)
    lines = [one.ridge for one in found if one.kind == "ridge" and one.ridge is not None]
    assert len(lines) >= 0.85 * len(found)
    assert share([line.exponent == exponent and line.low <= 2**at <= line.high for line in lines]) >= 0.95
    assert words in lines[0].why
    assert share([one.kind == "interior" for one in found]) <= 0.05


def test_a_tilted_hill_is_not_a_ridge() -> None:
    def hill(z: Floats) -> Floats:
        return 0.7 - 0.04 * (z[:, 0] + z[:, 1] - 17) ** 2 - 0.02 * (z[:, 0] - z[:, 1] + 1) ** 2

    found = found_on(hill, *FIVE, noise=0.02, count=20)
    assert share([one.kind == "interior" for one in found]) >= 0.9
    assert all(one.axes[0].low <= 256 <= one.axes[0].high for one in found)


@pytest.mark.parametrize(("slope", "end", "as_good"), [(1, "high", (512.0, 8192.0)), (-1, "low", (64.0, 512.0))])
def test_a_plateau_names_the_smallest_setting_that_is_as_good(
    slope: int, end: str, as_good: tuple[float, float]
) -> None:
    def plateau(z: Floats) -> Floats:
        return 0.6 - 0.12 * np.maximum(0, slope * (9 - z[:, 0]))

    found = found_on(plateau, BATCHES, noise=0.015, seeds=5, count=60)
    flats = [one.plateaus[0] for one in found if one.kind == "plateau"]
    assert len(flats) >= 0.7 * len(found)
    assert {flat.end for flat in flats} == {end}
    assert (
        share([as_good[0] <= flat.smallest * (1 + 1e-9) < flat.largest <= as_good[1] * (1 + 1e-9) for flat in flats])
        >= 0.95
    )
    assert share([(round(flat.smallest), round(flat.largest)) == as_good for flat in flats]) >= 0.7
    assert all(f"the smallest that is as good, {flat.smallest:.6g}, costs at most" in flat.why for flat in flats)
    assert share([one.kind == "interior" for one in found]) <= 0.1


@pytest.mark.parametrize(("best", "other", "widths", "seeds"), [(10.8, 5.2, (0.7, 1.3), 8), (10.9, 5.0, (0.6, 0.7), 8)])
def test_the_region_holds_the_higher_of_two_peaks(
    best: float, other: float, widths: tuple[float, float], seeds: int
) -> None:
    def peaks(z: Floats) -> Floats:
        return np.maximum(
            np.exp(-(((z[:, 0] - best) / widths[0]) ** 2) / 2),
            0.8 * np.exp(-(((z[:, 0] - other) / widths[1]) ** 2) / 2),
        )

    found = found_on(peaks, tuple(2**level for level in range(4, 13)), noise=0.05, seeds=seeds)
    assert share([one.axes[0].low <= 2**best <= one.axes[0].high for one in found]) >= 0.95


def test_an_edge_is_said_only_where_the_results_show_it() -> None:
    found = found_on(
        lambda z: 1 - 0.15 * (z[:, 0] - np.log2(480)) ** 2, (100, 200, 300, 400, 500, 600), noise=0.2, count=100
    )
    assert share(["the best lies at the edge" in one.why for one in found]) <= 0.05
    assert not any(one.axes[0].at_edge == "low" for one in found)


@pytest.mark.parametrize("at", [6.3, 9.0, 12.0, 13.0])
def test_a_region_that_reaches_an_end_is_never_interior(at: float) -> None:
    found = found_on(lambda z: 0.7 - 0.02 * (z[:, 0] - at) ** 2, BATCHES, noise=0.04)
    assert not any(one.kind == "interior" and any(axis.reaches for axis in one.axes) for one in found)


def test_large_numbers_do_not_overflow() -> None:
    (found,) = found_on(lambda z: 1e200 * (0.7 - 0.02 * (z[:, 0] - 9) ** 2), BATCHES, noise=1e198, count=1)
    assert found.kind == "interior"
    assert found.predicted == pytest.approx(0.7e200, rel=0.1)


def test_a_result_that_is_not_finite_is_refused() -> None:
    x = np.repeat([[64.0], [128.0], [256.0], [512.0]], 3, axis=0)
    with pytest.raises(ValueError, match="1 results are NaN or infinite"):
        find_optimum(x, np.r_[np.nan, np.ones(11)], names=["batch"])


def test_neighboring_integers_are_not_refined() -> None:
    found = found_on(lambda z: np.where(z[:, 0] <= 1, z[:, 0], 0.0) + 0.0, (1, 2, 3, 4, 5), noise=0.01, count=5)
    assert all(one.finer == () for one in found)
