"""The line of the training's bar: it fits the terminal, and what matters most stays."""

from __future__ import annotations

import io

import pytest

from query_mutator.cli.bar import FittingBar, fitted, time_left

FIGURES = ["83 min left", "valid 63%", "return +0.49", "157 calls/s", "limit 91%", "0 failed"]


def line(columns: int | None, *figures: str) -> str:
    return fitted(figures or FIGURES, name="training: ", n=2048, total=5120, columns=columns, fill="█")


@pytest.mark.parametrize("columns", range(8, 200))
def test_a_line_is_never_longer_than_the_terminal(columns: int) -> None:
    assert len(line(columns)) <= columns


def test_80_columns_have_room_for_every_figure() -> None:
    assert line(79) == " 40%  83 min left, valid 63%, return +0.49, 157 calls/s, limit 91%, 0 failed"
    assert line(95).startswith(" 40%|██")
    assert line(120).startswith("training  40%|██")
    assert line(None) == f"training  40%|████      | {', '.join(FIGURES)}, 2048/5120"


def test_the_last_figures_are_left_out_first() -> None:
    assert line(59) == " 40%  83 min left, valid 63%, return +0.49, 157 calls/s"
    assert line(39) == " 40%  83 min left, valid 63%, limit 91%"  # the next one that still fits
    assert line(20) == " 40%  83 min left"


def test_a_message_that_does_not_fit_is_cut() -> None:
    assert line(24, "waiting for http://127.0.0.1:11434") == " 40%  waiting for http:/"


@pytest.mark.parametrize(
    ("steps", "done", "elapsed_s", "text"),
    [(10, 0, 5.0, ""), (100, 50, 10.0, "20 s left"), (100, 1, 3.0, "5 min left"), (10**4, 1, 1.0, "3 h left"),
     (10**6, 1, 1.0, "12 d left"), (0, 5, 9.0, "0 s left")],
)  # fmt: skip
def test_time_left_is_that_of_the_pace_so_far(steps: int, done: int, elapsed_s: float, text: str) -> None:
    assert time_left(steps, done=done, elapsed_s=elapsed_s) == text


def test_a_bar_shows_its_figures_or_what_it_waits_for() -> None:
    out = io.StringIO()
    with FittingBar(total=10, initial=4, desc="training", file=out, ncols=60, mininterval=0) as bar:
        bar.figures = lambda: ["valid 63%"]
        bar.update(2)
        assert str(bar).startswith("training  60%|")
        assert "0 s left, valid 63%, 6/10" in str(bar)
        bar.set_postfix_str("waiting for the server")
        assert "waiting for the server" in str(bar)
        assert "valid" not in str(bar)
