"""The golden middle on synthetic surfaces whose optimum is known."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from query_mutator.lab.sweep.surface import Optimum, find_optimum, pareto_front
from query_mutator.stats.intervals import Floats

pytestmark = pytest.mark.slow

REPEATS = 60  # benchmarks/sweep_surfaces.py has more of them
BATCHES, SPEEDS = (64, 128, 256, 512, 1024, 2048, 8192), (160, 512, 1024)


def grid(*levels: tuple[int, ...], seeds: int = 3) -> Floats:
    points = np.stack(np.meshgrid(*levels, indexing="ij"), axis=-1).reshape(-1, len(levels))
    return np.repeat(points, seeds, axis=0).astype(float)


def repeats(x: Floats, surface: Callable[[Floats], Floats], *, noise: float, count: int = REPEATS) -> list[Optimum]:
    rng, names = np.random.default_rng(1), [f"axis_{d}" for d in range(x.shape[1])]
    truth = surface(np.log2(x))
    return [find_optimum(x, truth + noise * rng.normal(size=len(x)), names=names) for _ in range(count)]


def covered(found: list[Optimum], *truth: float) -> float:
    inside = [
        all(axis.low <= at <= axis.high for axis, at in zip(optimum.axes, truth, strict=True)) for optimum in found
    ]
    return float(np.mean(inside))


def hill(logs: Floats) -> Floats:
    return 0.7 - 0.02 * (logs[:, 0] - 9) ** 2


def bump(logs: Floats) -> Floats:
    return 0.3 + 0.4 * np.exp(-(((logs[:, 0] - 8.7) / 2.5) ** 2) - ((logs[:, 1] - 8.9) / 2) ** 2)


def test_an_interior_optimum_is_recovered_at_the_stated_confidence() -> None:
    found = repeats(grid(BATCHES), hill, noise=0.03)
    assert {optimum.confidence for optimum in found} == {0.95}
    assert covered(found, 512) >= 0.95
    assert np.mean([optimum.kind == "interior" for optimum in found]) >= 0.95


def test_an_interior_optimum_of_two_axes_that_is_not_quadratic() -> None:
    found = repeats(grid(BATCHES[::2], SPEEDS), bump, noise=0.03)
    assert covered(found, 2**8.7, 2**8.9) >= 0.95
    assert np.mean([optimum.kind == "interior" for optimum in found]) >= 0.95


@pytest.mark.parametrize(("left", "right", "at"), [(0.15, 0.03, 9.0), (0.03, 0.15, 9.0), (0.12, 0.06, 8.4)])
def test_the_region_holds_a_peak_with_a_kink(left: float, right: float, at: float) -> None:
    def kinked(logs: Floats) -> Floats:
        return 0.7 - np.where(logs[:, 0] < at, left * (at - logs[:, 0]), right * (logs[:, 0] - at))

    assert covered(repeats(grid(BATCHES), kinked, noise=0.03), 2**at) >= 0.95


@pytest.mark.parametrize("bend", [0.0, 1.0])
def test_a_monotone_surface_is_an_edge_optimum(bend: float) -> None:
    def rising(logs: Floats) -> Floats:
        return 0.05 * logs[:, 0] + bend * (1 - np.exp((6 - logs[:, 0]) / 2))

    found = repeats(grid(BATCHES), rising, noise=0.03)
    assert np.mean([optimum.kind == "edge" for optimum in found]) >= 0.95
    assert not any(optimum.kind == "interior" for optimum in found)
    assert "extend it there" in found[0].why
    assert {optimum.axes[0].at_edge for optimum in found} <= {"high", None}
    if not bend:
        assert np.mean([optimum.axes[0].at_edge == "high" for optimum in found]) >= 0.8


def test_noise_alone_has_no_golden_middle() -> None:
    found = repeats(grid(BATCHES), lambda logs: np.zeros(len(logs)), noise=0.05)
    assert np.mean([optimum.kind == "interior" for optimum in found]) <= 0.05
    assert np.mean([optimum.kind == "undecided" for optimum in found]) >= 0.9
    assert "these seeds show no difference" in found[0].why


def test_an_axis_that_changes_nothing_is_reported() -> None:
    def ridge(logs: Floats) -> Floats:
        return 0.3 - 0.02 * (logs[:, 0] - 7) ** 2

    found = repeats(grid((32, 128, 512), SPEEDS), ridge, noise=0.02)
    expected = "along axis_0 the best lies inside the grid; along axis_1 these seeds show no difference"
    assert np.mean([optimum.kind == "undecided" and optimum.why.startswith(expected) for optimum in found]) >= 0.75
    assert np.mean([optimum.kind == "interior" for optimum in found]) <= 0.05


def test_where_less_is_better_the_lowest_point_is_the_optimum() -> None:
    x = grid(BATCHES)
    noise = 0.01 * np.random.default_rng(0).normal(size=len(x))
    found = find_optimum(x, 25 - hill(np.log2(x)) + noise, names=["batch"], maximize=False)
    assert found.kind == "interior"
    assert 300 < found.axes[0].best < 900
    assert found.predicted == pytest.approx(24.3, abs=0.05)


@pytest.mark.parametrize(
    ("x", "words"),
    [(grid((64, 512)), "at least 3"), (grid((0, 1, 2)), "above 0"), (grid((1, 2, 3), seeds=1), "too few")],
)
def test_a_grid_that_is_too_small_says_so(x: Floats, words: str) -> None:
    with np.errstate(divide="ignore"), pytest.raises(ValueError, match=words):
        find_optimum(x, np.ones(len(x)), names=["batch"])


def test_pareto_front() -> None:
    assert pareto_front([0.5, 0.7, 0.6, 0.7], [100, 50, 80, 40]) == [1, 2, 0]
    assert pareto_front([], []) == []
