"""Rows of metrics: what is written, and what TensorBoard reads back."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from query_mutator.files.json_lines import read_json_lines
from query_mutator.files.metrics import MetricsWriter
from query_mutator.lab.analysis.events import merged, read_event_file


def test_row_has_step_clock_and_numbers(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    writer.write({"validation/success": 0.25, "llm/calls": 12}, step=512, wall_s=1.23456)
    writer.close()
    (row,) = read_json_lines(tmp_path / "metrics.jsonl")
    assert row == {
        "step": 512,
        "wall_s": 1.235,
        "validation/success": 0.25,
        "llm/calls": 12.0,
    }


def test_number_that_is_not_finite_is_left_out(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    writer.write({"validation/success": float("nan"), "validation/score": 1.0}, step=1, wall_s=0)
    writer.close()
    assert list(read_json_lines(tmp_path / "metrics.jsonl")) == [{"step": 1, "wall_s": 0, "validation/score": 1.0}]


def test_unknown_key_is_refused(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    with pytest.raises(KeyError, match="validation/sucess"):
        writer.write({"validation/sucess": 1.0}, step=1, wall_s=0)
    writer.close()
    writer.close()


def scalars(folder: Path, key: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(key)]


def test_tensorboard_reads_the_same_numbers(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    for step in (1, 2):
        writer.write({"validation/success": step / 4}, step=step, wall_s=step)
    writer.close()
    assert scalars(tmp_path, "validation/success") == [(1, 0.25), (2, 0.5)]


def test_a_clock_that_is_set_back_leaves_the_points_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = MetricsWriter(tmp_path)
    for step in (1, 2, 3):
        first.write({"validation/success": step / 4}, step=step, wall_s=step)
    first.close()
    now_s = time.time() - 3600
    monkeypatch.setattr(time, "time", lambda: now_s)
    monkeypatch.setattr(time, "time_ns", lambda: int(now_s * 1e9))
    again = MetricsWriter(tmp_path, first_step=2)
    again.write({"validation/success": 1.0}, step=3, wall_s=3)
    again.close()
    expected = [(1, 0.25), (2, 0.5), (3, 1.0)]
    assert scalars(tmp_path, "validation/success") == expected
    files = [read_event_file(path) for path in sorted((tmp_path / "tensorboard").iterdir())]
    series = merged(files, "validation/success")
    assert list(zip(series.step.tolist(), series.value.tolist(), strict=True)) == expected


def test_going_on_drops_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    first = MetricsWriter(tmp_path)
    first.write({"validation/success": 0.25}, step=1, wall_s=1)
    kept = first.rows.size_bytes
    first.write({"validation/success": 0.9}, step=2, wall_s=2)
    first.close()
    second = MetricsWriter(tmp_path, cut_at=kept, first_step=1)
    second.write({"validation/success": 0.5}, step=2, wall_s=2)
    second.close()
    rows = read_json_lines(tmp_path / "metrics.jsonl")
    assert [(row["step"], row["validation/success"]) for row in rows] == [(1, 0.25), (2, 0.5)]
    assert scalars(tmp_path, "validation/success") == [(1, 0.25), (2, 0.5)]
