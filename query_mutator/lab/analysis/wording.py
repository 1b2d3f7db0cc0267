"""Numbers, intervals and places as text, the same in every output."""

from __future__ import annotations

import math

from query_mutator.lab.analysis.curves import CLOCK_AXES, Reading
from query_mutator.lab.analysis.results import Comparison
from query_mutator.lab.analysis.spec import MetricSpec
from query_mutator.stats.intervals import Interval

__all__ = ["at", "clock", "interval", "number", "percent", "place", "reading_name", "trace_of"]


def number(value: float, *, signed: bool = False) -> str:
    """Return a number with four significant digits."""
    if math.isnan(value):
        return "-"
    if value and abs(value) >= 1e4:
        return f"{value:+,.0f}" if signed else f"{value:,.0f}"
    return f"{value:+.4g}" if signed else f"{value:.4g}"


def interval(bounds: Interval, *, signed: bool = False) -> str:
    """Return an interval as [low, high]; "" for the whole line."""
    if not all(map(math.isfinite, bounds)):
        return ""
    return f"[{number(bounds[0], signed=signed)}, {number(bounds[1], signed=signed)}]"


def clock(seconds: float) -> str:
    """Return a time as h:mm:ss, "-" for one that is not known."""
    if not math.isfinite(seconds):
        return "-"
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def at(x: float, axis: str) -> str:
    """Return a place on an axis as text."""
    if axis in CLOCK_AXES and math.isfinite(x):
        return clock(x)
    return f"{x:,.0f}" if math.isfinite(x) and abs(x) >= 100 else number(x)


def place(x: float) -> str:
    """Return a place on an axis with all digits, so that the point can be found."""
    return f"{x:.12g}"


def trace_of(reading: Reading) -> str:
    """Return run, tag and x of a number."""
    divided = f", divided by {reading.divided_by}" if reading.divided_by else ""
    return f"{reading.run} {reading.tag} x={place(reading.x)}{divided}"


def percent(comparison: Comparison) -> str:
    """Return a difference as a share of the baseline, in brackets."""
    return f" ({100 * comparison.share:+.1f} %)" if math.isfinite(comparison.share) else ""


def reading_name(metric: MetricSpec, way: str) -> str:
    """Return a reducer of a metric in words."""
    names = {
        "mean_last_k": f"mean of last {metric.k}",
        "best_so_far": "best so far",
        "auc": "area under curve / width",
        "time_to_threshold": f"first x at {metric.threshold}",
    }
    return names.get(way, way)
