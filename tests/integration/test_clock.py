"""The system's clock is set back an hour in the middle of a run: nothing depends on it but what is shown."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from query_mutator.files.json_lines import read_json_lines
from query_mutator.testing import StubServer
from tests.integration.killing import transcript
from train_query_mutator import main

HOUR_S = 3600


def test_a_run_whose_clock_is_set_back_an_hour_is_the_same_run(
    tiny_flags: list[str], tiny_server: StubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = [*tiny_flags, "--deterministic", "--no-evaluate"]
    began_at = tiny_server.stats()["calls"]
    assert main([*flags, "--save-dir", str(tmp_path / "whole")]) == 0
    half = (tiny_server.stats()["calls"] - began_at) // 2
    again_at = tiny_server.stats()["calls"]

    real, real_ns = time.time, time.time_ns

    def back_s() -> int:
        return HOUR_S if tiny_server.stats()["calls"] - again_at > half else 0

    monkeypatch.setattr(time, "time", lambda: real() - back_s())
    monkeypatch.setattr(time, "time_ns", lambda: real_ns() - back_s() * 10**9)
    assert main([*flags, "--save-dir", str(tmp_path / "back")]) == 0
    whole, back = (tmp_path / name / "latest" for name in ("whole", "back"))
    assert transcript(back) == transcript(whole)
    rows = list(read_json_lines(back / "metrics.jsonl"))
    assert all(0 <= row["wall_s"] < 600 for row in rows)
    assert all(value >= 0 for row in rows for name, value in row.items() if name.endswith(("_s", "SPS", "per_second")))
