"""A sweep as a picture: means as a heat map, or as points on a line, with the region of the optimum."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from query_mutator.analysis.wording import number
from query_mutator.disk import disk_errors
from query_mutator.sweep.results import SettingResult
from query_mutator.sweep.surface import AxisOptimum, Optimum


def draw_sweep(results: Sequence[SettingResult], found: Optimum | str, path: Path, *, title: str) -> Path:
    """Write a PNG or SVG of the first two settings that were varied; others are averaged over."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = [name for name in results[0].setting if len({result.setting[name] for result in results}) > 1]
    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)  # no window, whatever the machine's default is
    axes = figure.add_subplot()
    if len(names) >= 2:
        _heat_map(figure, axes, results, names[0], names[1], found)
    else:
        _line(axes, results, names[0] if names else next(iter(results[0].setting)), found)
    axes.set_title(title, fontsize="medium", wrap=True)
    with disk_errors(path):
        figure.savefig(path)
    return path


def _heat_map(figure: Any, axes: Any, results: Sequence[SettingResult], x: str, y: str, found: Optimum | str) -> None:
    columns, rows = (sorted({result.setting[name] for result in results}, key=_order) for name in (x, y))
    sums, counts = np.zeros((len(rows), len(columns))), np.zeros((len(rows), len(columns)))
    for result in results:
        place = rows.index(result.setting[y]), columns.index(result.setting[x])
        sums[place] += result.mean
        counts[place] += 1
    means = np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0)
    image = axes.imshow(means, origin="lower", aspect="auto", cmap="viridis")
    figure.colorbar(image, ax=axes)
    middle = (np.nanmin(means) + np.nanmax(means)) / 2
    for (row, column), mean in np.ndenumerate(means):
        if np.isfinite(mean):
            color = "black" if mean > middle else "white"
            axes.text(column, row, number(float(mean)), ha="center", va="center", color=color, fontsize="small")
    axes.set_xticks(range(len(columns)), [str(value) for value in columns])
    axes.set_yticks(range(len(rows)), [str(value) for value in rows])
    axes.set(xlabel=x, ylabel=y)
    if not isinstance(found, str):
        region = {axis.name: axis for axis in found.axes}
        if x in region and y in region:
            _outline(axes, region[x], columns, region[y], rows)


def _outline(axes: Any, x: AxisOptimum, columns: Sequence[Any], y: AxisOptimum, rows: Sequence[Any]) -> None:
    from matplotlib.patches import Rectangle

    left, right, bottom, top = (
        _place(value, levels) for value, levels in ((x.low, columns), (x.high, columns), (y.low, rows), (y.high, rows))
    )
    axes.add_patch(Rectangle((left, bottom), right - left, top - bottom, fill=False, color="red", linewidth=1.5))
    axes.plot([_place(x.best, columns)], [_place(y.best, rows)], "r+", markersize=12)


def _place(value: float, levels: Sequence[Any]) -> float:
    """Return where a value stands between the cells of its levels."""
    return float(np.interp(np.log2(value), np.log2(np.array(levels, dtype=float)), np.arange(len(levels))))


def _line(axes: Any, results: Sequence[SettingResult], name: str, found: Optimum | str) -> None:
    numeric = all(isinstance(result.setting[name], (int, float)) for result in results)
    for result in results:
        x = result.setting[name]
        axes.plot([x] * len(result.values), result.values, ".", color="#7aa6c2")
        axes.plot([x], [result.mean], "o", color="#1b4965")
    if numeric:
        axes.set_xscale("log", base=2)
        axes.set_xticks([result.setting[name] for result in results], [str(result.setting[name]) for result in results])
    if not isinstance(found, str):
        axes.axvspan(found.axes[0].low, found.axes[0].high, color="#c1666b", alpha=0.15)
        axes.axvline(found.axes[0].best, color="#c1666b", linestyle="--")
    axes.set(xlabel=name)
    axes.grid(alpha=0.3)


def _order(value: object) -> tuple[bool, float, str]:
    return (False, float(value), "") if isinstance(value, (int, float)) else (True, 0.0, str(value))
