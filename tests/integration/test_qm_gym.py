"""`qm gym`: generated puzzles, a small server, and values that never worked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from query_mutator.batching import ReplayBuffer
from tests.qm_command import qm


def test_gym_run_plays_generated_puzzles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mock = ("gym", "run", "-t", "bytes", "--mock", "--num-episodes", "4", "--steps-per-episode", "3", "--json")
    assert qm(*mock, "--success-rate", "1") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["samples"], report["solved"]) == (12, 4)
    assert qm(*mock, "--max-samples", "5", "--buffer-size", "2", "-o", tmp_path / "b.bin") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["samples"], report["kept"], report["evicted"]) == (5, 2, 3)
    assert ReplayBuffer.load(tmp_path / "b.bin").size == 2


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--transport", "http"], "--transport http does not exist; use websocket (telnet, tcp, websocket)"),
        (["--output-mode", "text"], "--output-mode text does not exist; use normal (normal, agent, json)"),
        (["--output-mode", "binary"], "--output-mode binary does not exist; use json (normal, agent, json)"),
        (["--difficulty-min", "0.9", "--difficulty-max", "0.1"], "difficulty_range=(0.9, 0.1)"),
        (["--success-rate", "7", "--mock"], "success_rate=7.0 must be between 0 and 1"),
        (["--port", "1", "--retries", "0"], "nothing answers at telnet://localhost:1"),
    ],
)
def test_a_mistake_is_one_line(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert qm("gym", "run", "-t", "bytes", *flags) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"qm: {said}")
    assert err.count("\n") == 1


def test_gym_info_lists_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert qm("gym", "info", "--json") == 0
    info = json.loads(capsys.readouterr().out)
    assert info["transports"] == ["telnet", "tcp", "websocket"]
    assert info["connection"]["port"] == 8023
    assert qm("gym", "info") == 0
    assert "sudoku" in capsys.readouterr().out
