"""The golden middle on synthetic surfaces: hills, cliffs, ridges, rivals, and odd numbers of trials."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from query_mutator.errors import UsageError
from query_mutator.lab.sweep.job import Measured, _printed, best_setting, by_setting, optimum_of
from query_mutator.lab.sweep.surface import Cells, Optimum, find_optimum
from query_mutator.lab.sweep.trials import Trial
from query_mutator.stats import Floats

REPEATS = 60  # benchmarks/sweep_surfaces.py has more of them
BATCHES, SPEEDS = (64, 128, 256, 512, 1024, 2048, 8192), (160, 512, 1024)
Curve = Callable[[Floats], Floats]
NAN = math.nan


def grid(*levels: tuple[int, ...], seeds: int = 3) -> Floats:
    points = np.stack(np.meshgrid(*levels, indexing="ij"), axis=-1).reshape(-1, len(levels))
    return np.repeat(points, seeds, axis=0).astype(float)


def repeats(x: Floats, surface: Callable[[Floats], Floats], *, noise: float, count: int = REPEATS) -> list[Optimum]:
    rng, names = np.random.default_rng(1), ["batch", "speed"][: x.shape[1]]
    truth = surface(np.log2(x))
    return [find_optimum(x, truth + noise * rng.normal(size=len(x)), names=names) for _ in range(count)]


def covered(found: list[Optimum], *truth: float) -> float:
    inside = [
        all(axis.low <= at <= axis.high for axis, at in zip(optimum.axes, truth, strict=True)) for optimum in found
    ]
    return float(np.mean(inside))


def parabola(at: float) -> Curve:
    return lambda logs: 0.7 - 0.02 * (logs[:, 0] - at) ** 2


hill = parabola(9)


def bump(logs: Floats) -> Floats:
    return 0.3 + 0.4 * np.exp(-(((logs[:, 0] - 8.7) / 2.5) ** 2) - ((logs[:, 1] - 8.9) / 2) ** 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("levels", "surface", "truth"),
    [((BATCHES,), hill, (512,)), ((BATCHES[::2], SPEEDS), bump, (2**8.7, 2**8.9))],  # the second is not quadratic
)
def test_an_interior_optimum_is_recovered_at_the_stated_confidence(
    levels: tuple[tuple[int, ...], ...], surface: Curve, truth: tuple[float, ...]
) -> None:
    found = repeats(grid(*levels), surface, noise=0.03)
    assert {optimum.confidence for optimum in found} == {0.95}
    assert covered(found, *truth) >= 0.95
    assert np.mean([optimum.kind == "interior" for optimum in found]) >= 0.95


@pytest.mark.slow
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


@pytest.mark.slow
def test_noise_alone_has_no_golden_middle() -> None:
    found = repeats(grid(BATCHES), lambda logs: np.zeros(len(logs)), noise=0.05)
    assert np.mean([optimum.kind == "interior" for optimum in found]) <= 0.05
    assert np.mean([optimum.kind == "undecided" for optimum in found]) >= 0.9
    assert "these seeds show no difference" in found[0].why
    assert np.mean([bool(optimum.finer) for optimum in found]) <= 0.05


@pytest.mark.slow
def test_where_less_is_better_the_lowest_point_is_the_optimum() -> None:
    x = grid(BATCHES)
    noise = 0.01 * np.random.default_rng(0).normal(size=len(x))
    found = find_optimum(x, 25 - hill(np.log2(x)) + noise, names=["batch"], maximize=False)
    assert found.kind == "interior"
    assert 300 < found.axes[0].best < 900
    assert found.predicted == pytest.approx(24.3, abs=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("x", "words"),
    [
        (grid((64, 512)), "at least 3"),
        (grid((0, 1, 2)), "above 0"),
        (grid((1, 2, 3), seeds=1), "too few"),
        (grid(*[(1, 2, 3)] * 6), "more than 5 settings"),
    ],
)
def test_a_grid_that_is_too_small_or_too_wide_says_so(x: Floats, words: str) -> None:
    with np.errstate(divide="ignore"), pytest.raises(ValueError, match=words):
        find_optimum(x, np.log(x + 1).sum(axis=1), names=list("abcdef")[: x.shape[1]])
    with pytest.raises(ValueError, match="1 results are NaN or infinite"):
        find_optimum(grid((64, 128, 256, 512)), np.r_[np.nan, np.ones(11)], names=["batch"])


def test_a_setting_in_which_a_seed_diverged_is_shown_and_not_recommended() -> None:
    def row(lr: float, seed: int, performance: float | None) -> Measured:
        trial = Trial(setting={"lr": lr}, seed=seed)
        lost = performance is None
        return Measured(trial=trial, performance=performance, throughput=lr, has_diverged=lost)

    rows = [row(lr, seed, 0.1 * place + 0.01 * seed) for place, lr in enumerate((1, 2, 4, 8)) for seed in range(3)]
    rows += [row(16, seed, None if seed == 2 else 0.9) for seed in range(3)]
    results = by_setting(rows)
    best = best_setting(results, optimum_of(rows, maximize=True), maximize=True)
    assert best.setting == {"lr": 8}
    sick = next(result for result in results if result.setting == {"lr": 16})
    assert (sick.diverged, sick.repeats) == (1, "2 seeds, 1 more diverged")
    with pytest.raises(UsageError, match="no setting has a finite number"):
        best_setting([sick], "no surface", maximize=True)


@pytest.mark.parametrize(
    ("line", "numbers"),
    [
        (
            '{"success": 0.5, "loss": NaN, "return": Infinity, "name": "x"}',
            {"success": 0.5, "loss": NAN, "return": NAN},
        ),
        (f'{{"steps": 1{"0" * 400}}}', {"steps": NAN}),
        ("[" * 100_000, {}),
        ("[1, 2]", {}),
        ("", {}),
    ],
    ids=["odd", "large", "deep", "list", "empty"],
)
def test_a_trial_s_last_line_gives_its_numbers(line: str, numbers: dict[str, float], tmp_path: Path) -> None:
    (tmp_path / "stdout.txt").write_text(f"some text\n{line}\n")
    assert _printed(tmp_path) == pytest.approx(numbers, nan_ok=True)


def cliff(at: float) -> Curve:
    return lambda z: np.where(z[:, 0] <= at, 0.4 + 0.05 * (z[:, 0] - 6), 0.1)


def bell(at: float, width: float) -> Curve:
    return lambda z: 0.3 + 0.4 * np.exp(-(((z[:, 0] - at) / width) ** 2) / 2)


def tried(optimum: Optimum) -> list[float]:
    """Return log2 of the values that --grid is to try for the first setting."""
    return [float(np.log2(float(value))) for value in optimum.finer[0].partition("=")[2].split(",")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("surface", "at"),
    [(cliff(9.6), 9.6), (cliff(9.9), 9.9), (cliff(11.8), 11.8), (bell(8.3, 0.25), 8.3), (bell(8.5, 0.4), 8.5)],
)
@pytest.mark.parametrize("seeds", [3, 8])
def test_a_cliff_or_a_narrow_peak_is_held_or_answered_with_values_around_it(
    surface: Curve, at: float, seeds: int
) -> None:
    found = repeats(grid(BATCHES, seeds=seeds), surface, noise=0.02, count=25)
    inside = [bool(one.axes[0].low <= 2**at <= one.axes[0].high) for one in found]
    assert np.mean(inside) >= 0.95
    coarse = [one for one in found if one.kind == "coarse"]
    assert len(coarse) >= (0.95 if seeds == 8 else 0.8) * len(found)
    assert all("the grid is too coarse here: try --grid batch=" in one.why for one in coarse)
    assert np.mean([min(tried(one)) < at < max(tried(one)) for one in coarse]) >= 0.95


FINE = np.stack(np.meshgrid(range(6, 11), range(7, 12), indexing="ij"), axis=-1).reshape(-1, 2).astype(float)
LOGS = np.repeat(FINE, 3, axis=0)


def hump(at: tuple[float, float], width: float, height: float) -> Floats:
    return np.asarray(height * np.exp(-((LOGS - at) ** 2).sum(axis=1) / (2 * width**2)))


def noisy(surface: Floats, seed: int) -> Floats:
    return surface + 0.03 * np.random.default_rng(seed).normal(size=len(LOGS))


UNEQUAL = np.maximum(hump((9.5, 8.3), 0.5, 1.0), hump((8.0, 9.6), 0.8, 0.8))  # on the grid at most 0.51 and 0.71


@pytest.mark.parametrize("seed", range(3))
def test_two_peaks_of_which_the_higher_lies_between_settings_are_alike(seed: int) -> None:
    found = find_optimum(2**LOGS, noisy(UNEQUAL, seed), names=["batch", "speed"])
    assert found.kind == "undecided"
    assert found.why.startswith("several regions are alike: near batch=256, speed=1024; near batch=")
    assert all(axis.low <= 2**at <= axis.high for axis, at in zip(found.axes, (9.5, 8.3), strict=True))
    assert Cells(LOGS[3:], noisy(UNEQUAL, seed)[3:]).rivals == []  # not a full grid


@pytest.mark.parametrize(
    "surface",
    [
        hump((8.4, 9.1), 1.0, 1.0),
        0.7 - 0.04 * (LOGS.sum(axis=1) - 17) ** 2 - 0.02 * (LOGS @ [1, -1] + 1) ** 2,
        np.maximum(hump((9, 8), 0.8, 1.0), hump((7, 10), 0.8, 0.7)),  # both tops are measured
        0 * LOGS[:, 0],
    ],
)
def test_a_hill_a_ridge_and_a_lower_peak_have_no_rival(surface: Floats) -> None:
    assert [Cells(LOGS, noisy(surface, seed)).rivals for seed in range(20)] == [[]] * 20
