"""Waits and measurements on a machine that may be busy."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

#: Of a call. The delays of a busy machine weigh less, the longer a call takes.
LATENCIES_MS = (60.0, 240.0, 960.0)

T = TypeVar("T")


def measured(measure: Callable[[float], T], is_right: Callable[[T], bool]) -> T:
    """Return the first right result of `measure(latency_ms)`, else the last one, for the assertion that fails."""
    for latency_ms in LATENCIES_MS:
        found = measure(latency_ms)
        if is_right(found):
            break
    return found


def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition is met; fail after a minute."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "the condition was not met in a minute"
        time.sleep(0.002)
