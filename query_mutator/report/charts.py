"""Numbers as text, and the geometry of charts in percent of a plot, of which the templates draw SVG.

A plot has no fixed width, so that its text keeps its size on a phone; only curves are stretched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

MAX_POINTS = 200  # of a curve
_MINUS, _NONE = "−", "–"
_SIZES = (1, 2, 2.5, 5, 10)  # between two ticks, times a power of 10
_LABEL_PX = 13  # between two labels
Point = tuple[float, float]

METHODS = ("identity", "random", "best_single", "best_of_k", "best_plan", "policy")
_CONTROLS = ("ask", "undo", "submit")
_NUM_COLORS = 16


# --- numbers ---------------------------------------------------------------------------------------------------------


def is_number(value: object) -> bool:
    """Return whether a value is a finite number."""
    return isinstance(value, (int, float)) and math.isfinite(value)


def fixed(value: Any, digits: int = 0, *, sign: str = "") -> str:
    """Return a number with `digits` digits, or a dash if it is not a number."""
    if not is_number(value):
        return _NONE
    text = f"{value:{sign},.{digits}f}"
    return (text if float(text.replace(",", "")) else text.lstrip("+-")).replace("-", _MINUS)


def signed(value: Any, digits: int = 0) -> str:
    """Return a difference with its sign."""
    return fixed(value, digits, sign="+")


def percent(share: Any, digits: int = 1) -> str:
    """Return a share in percent."""
    return fixed(100 * share, digits) if is_number(share) else _NONE


def points(share: Any) -> str:
    """Return a difference of shares in points."""
    return signed(100 * share, 1) if is_number(share) else _NONE


def interval(ci: Any, show: Callable[[Any], str] = percent) -> str:
    """Return an interval, "" for none."""
    return f"[{show(ci[0])}, {show(ci[1])}]" if ci and all(map(is_number, ci)) else ""


def compact(value: Any) -> str:
    """Return a number of three digits."""
    if not is_number(value):
        return _NONE
    size = abs(value)
    if size and size < 1e-4:
        return f"{value:.1e}".replace("-", _MINUS)
    for least, unit, name in ((1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if size >= least:
            return fixed(value / unit, 1) + name
    digits = max(0, 2 - math.floor(math.log10(size))) if size else 0
    text = f"{value:.{digits}f}"
    return (text.rstrip("0").rstrip(".") if digits else text).replace("-", _MINUS)


def seconds(value: Any) -> str:
    """Return a time with its unit."""
    if not is_number(value):
        return _NONE
    for end, scale, digits, unit in ((1e-4, 1e6, 1, "µs"), (0.01, 1e3, 1, "ms"), (1, 1e3, 0, "ms"), (120, 1, 1, "s")):
        if value < end:
            return f"{fixed(scale * value, digits)} {unit}" if value else "0 s"
    return f"{fixed(value / 60)} min" if value < 7200 else f"{fixed(value / 3600, 1)} h"


def measure(value: Any, unit: str = "") -> str:
    """Return a figure with its unit."""
    if not is_number(value):
        return str(value)
    if unit in ("s", "share"):
        return seconds(value) if unit == "s" else f"{percent(value)} %"
    text = fixed(value) if float(value).is_integer() else compact(value)
    return text + (f" {unit}" if unit not in ("", "1") else "")


def probability(p: Any) -> str:
    """Return a p value."""
    return "< 0.001" if is_number(p) and p < 0.001 else fixed(p, 3)


def plural(count: int, noun: str) -> str:
    """Return a number of things."""
    return f"{fixed(count)} {noun}{'' if count == 1 else 's'}"


def method_color(name: str) -> str:
    """Return the color of a method."""
    return f"var(--m-{name.replace('_', '-')})" if name in METHODS else "var(--dim)"


def operator_color(name: str, operators: Sequence[str]) -> str:
    """Return the color of an operator, which is that of its place in the run's list; the controls are grey."""
    if name in _CONTROLS:
        return f"var(--control-{_CONTROLS.index(name) + 1})"
    names = [each for each in operators if each not in _CONTROLS]
    return f"var(--c{names.index(name) % _NUM_COLORS})" if name in names else "var(--rest)"


# --- geometry --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Axis:
    """A scale from values to percent of the plot, from the left or, of a vertical one, from the top."""

    low: float
    high: float
    ticks: Sequence[float]
    label: str = ""
    show: Callable[[Any], str] = compact
    vertical: bool = False

    def at(self, value: float) -> float:
        """Return the place of a value, within the plot."""
        share = min(1.0, max(0.0, (value - self.low) / ((self.high - self.low) or 1.0)))
        return round(100 * (1 - share if self.vertical else share), 2)


def axis(
    values: Sequence[Any], *, zero: bool = False, whole: bool = False, tight: bool = False, count: int = 5, **more: Any
) -> Axis:
    """Return an axis around the values that are numbers, and 0 if `zero`; it ends at ticks unless it is `tight`.

    `whole`: no tick between two whole numbers.
    """
    found = [*filter(is_number, values), *([0] if zero else [])] or [0, 1]
    low, high = min(found), max(found)
    if low == high:
        low, high = low - 0.1 * (abs(low) or 1), high + 0.1 * (abs(high) or 1)
    rough = (high - low) / count
    power = 10 ** math.floor(math.log10(rough))
    step = next(size * power for size in _SIZES if size * power >= 0.999 * rough)
    step = max(1.0, step) if whole else step
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = [round(step * place, 12) for place in range(first, last + 1)]
    if tight:
        return Axis(low=low, high=high, ticks=[tick for tick in ticks if low <= tick <= high], **more)
    return Axis(low=ticks[0], high=ticks[-1], ticks=ticks, **more)


def path(points: Sequence[Sequence[Any]], x: Axis, y: Axis) -> str:
    """Return the path of an SVG through [x, y] points; a value that is missing ends a piece."""
    text, pen = "", "M"
    for at, value in points:
        if is_number(value):
            text += f"{pen}{x.at(at):g},{y.at(value):g}"
        pen = "L" if is_number(value) else "M"
    return text


def area(band: Sequence[Sequence[Any]], x: Axis, y: Axis) -> str:
    """Return the path around a band of [x, low, high]."""
    known = [each for each in band if all(map(is_number, each))]
    upper, lower = path([(at, high) for at, _, high in known], x, y), [(at, low) for at, low, _ in reversed(known)]
    return f"{upper}L{path(lower, x, y)[1:]}Z" if len(known) > 1 else ""


def stairs(points: Sequence[Mapping[str, Any]], x: Axis, y: Axis) -> str:
    """Return the path of a Pareto front."""
    front = sorted((point["calls"], point["success"]) for point in points if point["on_front"])
    corners = [corner for one, (at, high) in pairwise(front) for corner in (one, (at, one[1]))]
    return path([*corners, *front[-1:], *([(x.high, front[-1][1])] if front else [])], x, y)


def spread(places: Sequence[float], *, height: int) -> list[float]:
    """Return places of labels, in percent of a height in pixels, moved apart as little as needed."""
    gap, moved = 100 * _LABEL_PX / height, list(places)
    order = sorted(range(len(places)), key=places.__getitem__)
    last = -gap
    for index in order:
        last = moved[index] = max(moved[index], last + gap)
    last = 100 + gap
    for index in reversed(order):
        last = moved[index] = min(moved[index], last - gap)
    return moved


def columns(places: Sequence[float]) -> list[Point]:
    """Return left end and width of the part of a plot that is nearest to each place, in percent."""
    ends = [0.0, *((one + other) / 2 for one, other in pairwise(places)), 100.0]
    return [(left, right - left) for left, right in pairwise(ends)]


def by_step(series: Sequence[Mapping[str, Any]]) -> list[tuple[float, list[Any]]]:
    """Return each step with the value of every series there, None for one without."""
    found = [dict(each["points"]) for each in series]
    return [
        (step, [values.get(step) for values in found]) for step in sorted({step for each in found for step in each})
    ]


def thin(rows: Sequence[Any], most: int = MAX_POINTS) -> list[Any]:
    """Return a maximum number of rows, evenly spread, including the last."""
    step = max(1, math.ceil(len(rows) / most))
    return [*rows[(len(rows) - 1) % step :: step]]
