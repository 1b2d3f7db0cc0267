"""A second peak whose top may lie between the settings: the results do not show which is higher."""

from __future__ import annotations

import numpy as np
import pytest

from query_mutator.lab.sweep.cells import Cells
from query_mutator.lab.sweep.surface import find_optimum
from query_mutator.stats.intervals import Floats

GRID = np.stack(np.meshgrid(range(6, 11), range(7, 12), indexing="ij"), axis=-1).reshape(-1, 2).astype(float)
LOGS = np.repeat(GRID, 3, axis=0)


def bell(at: tuple[float, float], width: float, height: float) -> Floats:
    return np.asarray(height * np.exp(-((LOGS - at) ** 2).sum(axis=1) / (2 * width**2)))


def noisy(surface: Floats, seed: int) -> Floats:
    return surface + 0.03 * np.random.default_rng(seed).normal(size=len(LOGS))


UNEQUAL = np.maximum(bell((9.5, 8.3), 0.5, 1.0), bell((8.0, 9.6), 0.8, 0.8))  # on the grid at most 0.51 and 0.71


@pytest.mark.parametrize("seed", range(3))
def test_two_peaks_of_which_the_higher_lies_between_settings_are_alike(seed: int) -> None:
    found = find_optimum(2**LOGS, noisy(UNEQUAL, seed), names=["batch", "speed"])
    assert found.kind == "undecided"
    assert found.why.startswith("several regions are alike: near batch=256, speed=1024; near batch=")
    assert all(axis.low <= 2**at <= axis.high for axis, at in zip(found.axes, (9.5, 8.3), strict=True))


@pytest.mark.parametrize(
    "surface",
    [
        bell((8.4, 9.1), 1.0, 1.0),
        0.7 - 0.04 * (LOGS.sum(axis=1) - 17) ** 2 - 0.02 * (LOGS @ [1, -1] + 1) ** 2,
        np.maximum(bell((9, 8), 0.8, 1.0), bell((7, 10), 0.8, 0.7)),  # both tops are measured
        0 * LOGS[:, 0],
    ],
)
def test_a_hill_a_ridge_and_a_lower_peak_have_no_rival(surface: Floats) -> None:
    assert [Cells(LOGS, noisy(surface, seed)).rivals for seed in range(20)] == [[]] * 20


def test_settings_that_are_not_a_full_grid_show_no_rival() -> None:
    assert Cells(LOGS, noisy(UNEQUAL, 0)).rivals
    assert Cells(LOGS[3:], noisy(UNEQUAL, 0)[3:]).rivals == []
