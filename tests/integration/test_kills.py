"""Kills at random moments of training and evaluation: none loses more calls than were in flight.

`python -m tests.attack.kills` does the same forty times for each learner and 4 and 16 calls in flight.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.attack.kills import killed_run

KILLS = 4


@pytest.mark.parametrize(("algo", "batch_size"), [("ppo", 16), ("iqn", 4), ("bandit", 4)])
def test_no_kill_loses_more_calls_than_were_in_flight(algo: str, batch_size: int, tmp_path: Path) -> None:
    result = killed_run(algo, batch_size=batch_size, kills=KILLS, folder=tmp_path, rng=random.Random(5), env_steps=128)
    assert result.kills >= KILLS - 1  # the last moment may lie behind the end
    assert max(result.lost) <= batch_size
    assert min(result.lost) >= 0
    assert (result.same_transcript and result.same_weights) or algo != "ppo"
