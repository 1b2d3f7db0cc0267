"""Durations and time stamps as Ollama writes them."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from query_mutator.embedded.wire import FOREVER_S, parse_keep_alive, stamp, stamp_in


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (0, 0.0),
        (1.5, 1.5),
        (-1, FOREVER_S),
        ("5m", 300.0),
        ("1h30m", 5400.0),
        ("1.5h", 5400.0),
        ("250ms", 0.25),
        ("0", 0.0),
        ("-1m", FOREVER_S),
        ("+2s", 2.0),
    ],
)
def test_keep_alive_is_seconds_or_a_go_duration(value: float | str, seconds: float) -> None:
    assert parse_keep_alive(value) == pytest.approx(seconds)


@pytest.mark.parametrize("value", ["", "5", "soon", "5 m", "m", "5m!", "--5m"])
def test_an_invalid_duration_gets_gos_error_text(value: str) -> None:
    with pytest.raises(ValueError, match="time: invalid duration"):
        parse_keep_alive(value)


def test_stamps_are_utc_with_a_z() -> None:
    assert stamp(datetime(2024, 5, 6, 7, 8, 9, 120000, tzinfo=UTC)) == "2024-05-06T07:08:09.120000Z"
    assert stamp(datetime(2024, 5, 6, 7, 8, 9, tzinfo=UTC)) == "2024-05-06T07:08:09Z"
    assert int(stamp_in(FOREVER_S)[:4]) > 2300
