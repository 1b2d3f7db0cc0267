"""Times as Ollama writes them: integer nanoseconds, RFC 3339 stamps, and Go's "5m" in `keep_alive`."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from functools import lru_cache

DEFAULT_KEEP_ALIVE_S = 300.0
FOREVER_S = float("inf")

_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+\.?\d*|\.\d+)(ns|us|µs|ms|s|m|h)")
_LONGEST = timedelta(days=106_751)  # what fits into 64 bits of nanoseconds; Ollama's "for ever"


@lru_cache(maxsize=64)
def parse_keep_alive(value: float | str) -> float:
    """Return seconds for a number or a text such as "5m", "1h30m"; anything below 0 is for ever.

    Raises ValueError with Go's words for a text that is no duration.
    """
    if not isinstance(value, str):
        return FOREVER_S if value < 0 else float(value)
    sign, digits = (-1, value[1:]) if value.startswith("-") else (1, value.removeprefix("+"))
    if digits == "0":
        return 0.0
    parts = _PART.findall(digits)
    if not parts or "".join(number + unit for number, unit in parts) != digits:
        raise ValueError(f'time: invalid duration "{value}"')
    return FOREVER_S if sign < 0 else sum(float(number) * _UNITS_S[unit] for number, unit in parts)


def now_stamp() -> str:
    """Return the time in UTC as Ollama stamps replies."""
    return stamp(datetime.now(UTC))


def stamp(moment: datetime) -> str:
    """Return `moment` (in UTC) as RFC 3339 with a Z."""
    return moment.isoformat()[:26] + "Z" if moment.microsecond else moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def stamp_in(delay_s: float) -> str:
    """Return the stamp `delay_s` seconds from now, however far that is."""
    longest_s = _LONGEST.total_seconds()
    return stamp(datetime.now(UTC) + (timedelta(seconds=delay_s) if delay_s < longest_s else _LONGEST))
