"""Kills at random moments of training and evaluation: none loses more calls than were in flight.

`python -m benchmarks.attack.kills` does the same forty times for each learner and 4 and 16 calls in flight.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks.attack.kills import killed_run

pytestmark = pytest.mark.slow

KILLS = 4


@pytest.mark.parametrize(
    ("algo", "batch_size", "signals"),
    [
        ("ppo", 16, ["SIGKILL"]),
        ("iqn", 4, ["SIGKILL", "SIGINT", "SIGTERM"]),
        ("ppo", 4, ["SIGINT", "SIGTERM"]),
        ("asking", 4, ["SIGKILL", "SIGTERM"]),
    ],
)
def test_no_kill_loses_more_calls_than_were_in_flight(
    algo: str, batch_size: int, signals: list[str], tmp_path: Path
) -> None:
    rng = random.Random(5)
    result = killed_run(
        algo, batch_size=batch_size, kills=KILLS, folder=tmp_path, rng=rng, env_steps=128, signals=signals
    )
    assert not result.complaints
    assert result.kills == KILLS
    assert max(result.lost) <= batch_size
    assert min(result.lost) >= 0
    assert (result.same_transcript and result.same_weights) or algo not in ("ppo", "asking")
