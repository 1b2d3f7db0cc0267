"""The numbers of trials: odd ones that they print, and intervals of shares."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from query_mutator.lab.sweep.plan import Trial
from query_mutator.lab.sweep.results import Measured, _printed, by_setting
from query_mutator.lab.sweep.surface import find_optimum


@pytest.mark.parametrize(
    ("line", "numbers"),
    [
        (
            '{"success": 0.5, "loss": NaN, "return": Infinity, "steps": 1' + "0" * 400 + ', "name": "x"}',
            {"success": 0.5},
        ),
        ("[" * 100_000, {}),
        ("[1, 2]", {}),
        ("", {}),
    ],
    ids=["odd", "deep", "list", "empty"],
)
def test_a_trial_s_last_line_gives_its_finite_numbers(line: str, numbers: dict[str, float], tmp_path: Path) -> None:
    (tmp_path / "stdout.txt").write_text(f"some text\n{line}\n")
    assert _printed(tmp_path) == numbers


def test_the_interval_of_shares_stays_within_0_and_1() -> None:
    rows = [
        Measured(trial=Trial(setting={"lr": 1}, seed=seed), performance=value, throughput=None, source="")
        for seed, value in enumerate((0.6, 0.99))
    ]
    (free,) = by_setting(rows, maximize=True)
    (bounded,) = by_setting(rows, maximize=True, bounds=(0.0, 1.0))
    assert free.interval[1] > 1
    assert bounded.interval == (0.0, 1.0)


def test_more_settings_than_a_mesh_has_room_for_are_an_error_in_words() -> None:
    rng = np.random.default_rng(0)
    x = rng.uniform(1, 10, (40, 6))
    y = -((np.log(x) - 1) ** 2).sum(axis=1) + rng.normal(0, 0.01, 40)
    with pytest.raises(ValueError, match="more than 5 settings"):
        find_optimum(x, y, names=list("abcdef"))
