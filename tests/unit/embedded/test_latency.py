"""Latency: log-normal with the requested mean, equal for equal prompts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from query_mutator.embedded.latency import Latency
from query_mutator.embedded.server import ServerSettings


def test_latency_is_the_same_for_the_same_prompt_and_close_to_its_mean() -> None:
    latency = Latency.from_settings(latency_ms=100, sigma=1.0, running_speed=0, seed=3)
    times_s = np.array([latency.total_s(f"prompt {i}") for i in range(20_000)])
    assert latency.total_s("prompt 7") == times_s[7]
    assert times_s.mean() == pytest.approx(0.1, rel=0.03)
    assert np.log(times_s).std() == pytest.approx(1.0, rel=0.03)
    assert Latency.from_settings(latency_ms=100, sigma=1.0, running_speed=0, seed=4).total_s("prompt 7") != times_s[7]


def test_sigma_zero_is_constant_and_running_speed_is_sixteen_seconds_over_x() -> None:
    assert Latency.from_settings(latency_ms=100, sigma=0, running_speed=0).total_s("any") == 0.1
    assert Latency.from_settings(latency_ms=0, sigma=0, running_speed=4).total_s("any") == 4.0
    assert Latency.from_settings(latency_ms=0, sigma=1, running_speed=0).total_s("any") == 0.0


@pytest.mark.parametrize(
    "wrong",
    [
        {"latency_ms": -1},
        {"latency_sigma": float("nan")},
        {"running_speed": float("inf")},
        {"latency_ms": 1, "running_speed": 1},
    ],
)
def test_settings_out_of_range_are_value_errors(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must be|both set"):
        ServerSettings(**wrong).latency()
