"""A server that is killed and comes back: the run waits, and ends as if nothing had happened.

`python -m benchmarks.attack.outages` does the same with outages of a minute.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.attack.outages import BATCH_SIZE, survived

pytestmark = pytest.mark.slow


def test_a_server_that_is_killed_twice_in_training_and_twice_in_the_evaluation_costs_nothing(tmp_path: Path) -> None:
    ended = survived(away_s=1.5, folder=tmp_path)
    assert ended.exit_code == 0, ended.said
    assert ended.outages == 4
    assert ended.shown >= ended.outages
    assert ended.invalid_steps == 0
    assert 0 <= ended.repeated_calls <= ended.outages * BATCH_SIZE
