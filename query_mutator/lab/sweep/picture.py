"""A sweep as a figure: means as a heat map, or as points on a line, with the region of the optimum."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np

from query_mutator.lab.analysis.figures import new_figure, save_figure
from query_mutator.lab.sweep.results import SettingResult
from query_mutator.lab.sweep.shapes import Ridge
from query_mutator.lab.sweep.surface import AxisOptimum, Optimum
from query_mutator.stats.intervals import Floats

__all__ = ["draw_sweep"]

_AROUND = 0.45  # cells
_TITLE_CHARACTERS = 105


def draw_sweep(results: Sequence[SettingResult], found: Optimum | str, path: Path, *, title: str, metric: str) -> None:
    """Write a PNG or SVG of the first two settings that were varied, averaged over the others."""
    names = [name for name in results[0].setting if len({result.setting[name] for result in results}) > 1]
    figure = new_figure(8, 5)
    axes = figure.add_subplot()
    if len(names) >= 2:
        _heat_map(figure, axes, results, names[0], names[1], found, metric)
    else:
        _line(axes, results, names[0] if names else next(iter(results[0].setting), ""), found)
        axes.set(ylabel=metric)
    axes.set_title(fill(title, _TITLE_CHARACTERS), fontsize="small")
    save_figure(figure, path)


def _heat_map(
    figure: Any, axes: Any, results: Sequence[SettingResult], x: str, y: str, found: Optimum | str, metric: str
) -> None:
    columns, rows = (sorted({result.setting[name] for result in results}, key=_order) for name in (x, y))
    cells: dict[tuple[int, int], list[SettingResult]] = {}
    for result in results:
        cells.setdefault((rows.index(result.setting[y]), columns.index(result.setting[x])), []).append(result)
    means = np.full((len(rows), len(columns)), np.nan)
    for cell, of_cell in cells.items():
        means[cell] = np.mean([result.mean for result in of_cell])
    low, high = _color_range(means, results)
    image = axes.imshow(means, origin="lower", aspect="auto", cmap="viridis", vmin=low, vmax=high)
    figure.colorbar(image, ax=axes, label=metric)
    for (row, column), of_cell in cells.items():
        color = "black" if means[row, column] > (low + high) / 2 else "white"
        words = f"{means[row, column]:.3g}\n{_interval_of(of_cell)}".strip()
        axes.text(column, row - 0.18, words, ha="center", va="top", color=color, fontsize="small")
    axes.set_xticks(range(len(columns)), [str(value) for value in columns])
    axes.set_yticks(range(len(rows)), [str(value) for value in rows])
    axes.set(xlabel=x, ylabel=y)
    if not isinstance(found, str):
        region = {axis.name: axis for axis in found.axes}
        if x in region and y in region:
            if found.ridge is not None and {found.ridge.first, found.ridge.second} == {x, y}:
                _ridge(axes, found.ridge, x, columns, y, rows)
            else:
                _outline(axes, region[x], columns, region[y], rows, has_best=found.kind != "plateau")


def _color_range(means: Floats, results: Sequence[SettingResult]) -> tuple[float, float]:
    """Return the ends of the color scale, at least the width of a mean's interval apart, so that noise stays pale."""
    low, high = float(np.nanmin(means)), float(np.nanmax(means))
    widths = [result.interval[1] - result.interval[0] for result in results if np.isfinite(result.interval).all()]
    missing = max(0.0, (float(np.median(widths)) if widths else 0.0) - (high - low)) / 2
    return low - missing, high + missing


def _interval_of(results: Sequence[SettingResult]) -> str:
    if len(results) != 1 or not np.isfinite(results[0].interval).all():
        return ""
    return "[{:.3g}, {:.3g}]".format(*results[0].interval)


def _ridge(axes: Any, ridge: Ridge, x: str, columns: Sequence[Any], y: str, rows: Sequence[Any]) -> None:
    """Draw the line of the best settings, and the ends of its region across."""
    levels = {x: np.array(columns, dtype=float), y: np.array(rows, dtype=float)}
    second = np.geomspace(levels[ridge.second].min(), levels[ridge.second].max(), 201)
    for value, style in ((ridge.best, "-"), (ridge.low, "--"), (ridge.high, "--")):
        first = value / second**ridge.exponent
        inside = (first >= levels[ridge.first].min()) & (first <= levels[ridge.first].max())
        at = {ridge.first: first[inside], ridge.second: second[inside]}
        places = ([_place(one, levels[name].tolist()) for one in at[name].tolist()] for name in (x, y))
        label = {"-": f"ridge: {ridge.formula}"}.get(style) or ("95 % region" if value == ridge.low else None)
        axes.plot(*places, color="red", linestyle=style, linewidth=1.5, label=label)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2, frameon=False, fontsize="small")


def _outline(
    axes: Any, x: AxisOptimum, columns: Sequence[Any], y: AxisOptimum, rows: Sequence[Any], *, has_best: bool
) -> None:
    from matplotlib.patches import Rectangle

    (left, right), (bottom, top) = _sides(x, columns), _sides(y, rows)
    region = Rectangle((left, bottom), right - left, top - bottom, fill=False, color="red", linewidth=1.5)
    region.set_label("95 % region of the optimum")
    axes.add_patch(region)
    if has_best:
        axes.plot([_place(x.best, columns)], [_place(y.best, rows)], "r+", markersize=12, label="best guess")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2, frameon=False, fontsize="small")


def _sides(axis: AxisOptimum, levels: Sequence[Any]) -> tuple[float, float]:
    """Return the sides of a region; at an end of the grid around the cell, not through it."""
    low = _place(axis.low, levels) - ("low" in axis.reaches) * _AROUND
    return low, _place(axis.high, levels) + ("high" in axis.reaches) * _AROUND


def _place(value: float, levels: Sequence[Any]) -> float:
    """Return the position of a value between the cells of its levels."""
    return float(np.interp(np.log2(value), np.log2(np.array(levels, dtype=float)), np.arange(len(levels))))


def _line(axes: Any, results: Sequence[SettingResult], name: str, found: Optimum | str) -> None:
    levels = [result.setting.get(name, result.name) for result in results]
    numeric = all(isinstance(level, (int, float)) for level in levels)
    for result, x in zip(results, levels, strict=True):
        axes.plot([x] * len(result.values), result.values, ".", color="#7aa6c2")
        axes.plot([x], [result.mean], "o", color="#1b4965")
    if numeric:
        axes.set_xscale("log", base=2)
        axes.set_xticks(levels, map(str, levels))
    if not isinstance(found, str):
        spans = [(flat.smallest, flat.largest) for flat in found.plateaus] or [(found.axes[0].low, found.axes[0].high)]
        for low, high in spans:
            axes.axvspan(low, high, color="#c1666b", alpha=0.15)
        if not found.plateaus:
            axes.axvline(found.axes[0].best, color="#c1666b", linestyle="--")
    axes.set(xlabel=name)
    axes.grid(alpha=0.3)


def _order(value: object) -> tuple[bool, float, str]:
    return (False, float(value), "") if isinstance(value, (int, float)) else (True, 0.0, str(value))
