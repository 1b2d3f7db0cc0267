"""Curves of groups: the mean over seeds with its 95 % band, and each run thin behind it."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from query_mutator.analysis.compare import MetricResult
from query_mutator.analysis.curves import Curve
from query_mutator.analysis.events import Floats
from query_mutator.files import disk_errors
from query_mutator.stats.intervals import student_t

COLORS = ("#1b4965", "#c1666b", "#d4a017", "#2a9d8f", "#7d5ba6", "#6c757d", "#e07a5f", "#457b9d", "#81b29a", "#b5838d")
_POINTS = 200  # of a drawn mean
_DRAWN = 2000  # points of one run that are drawn at most


def draw_curves(results: Sequence[MetricResult], path: Path, *, unit: str) -> Path:
    """Write a PNG or SVG with a panel for each metric."""
    figure = _figure(results, unit)
    with disk_errors(path):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    return path


def svg_of(results: Sequence[MetricResult], *, unit: str) -> str:
    """Return the same as SVG source, to stand in a page."""
    out = io.BytesIO()
    _figure(results, unit).savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue().decode()


def mean_and_band(curves: Sequence[Curve]) -> tuple[Floats, Floats, Floats]:
    """Return x, mean and half width of the 95 % t interval over runs, where all runs have values."""
    low, high = max(curve.x[0] for curve in curves), min(curve.x[-1] for curve in curves)
    if high < low:
        return np.empty(0), np.empty(0), np.empty(0)
    x = np.linspace(low, high, _POINTS)
    values = np.stack([np.interp(x, curve.x, curve.y) for curve in curves])
    half = np.zeros(len(x))
    if len(curves) > 1:
        half = student_t(len(curves) - 1) * values.std(axis=0, ddof=1) / np.sqrt(len(curves))
    return x, values.mean(axis=0), half


def _figure(results: Sequence[MetricResult], unit: str) -> Any:
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    mpl.rcParams["svg.hashsalt"] = "query-mutator"  # the same curves give the same file
    figure = Figure(figsize=(8, 4.2 * len(results)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)  # no window, whatever the machine's default is
    for axes, result in zip(figure.subplots(len(results), squeeze=False)[:, 0], results, strict=True):
        _panel(axes, result, unit)
    return figure


def _panel(axes: Any, result: MetricResult, unit: str) -> None:
    for color, group in zip(_colors(len(result.groups)), result.groups, strict=True):
        curves = [curve.finite() for name, curve in result.curves if name == group.group]
        curves = [_best(curve, result) for curve in curves if len(curve)]
        for curve in curves:
            thin = curve.x[:: len(curve) // _DRAWN + 1], curve.y[:: len(curve) // _DRAWN + 1]
            axes.plot(*thin, color=color, alpha=0.3, linewidth=0.8)
        if curves:
            x, mean, half = mean_and_band(curves)
            runs = f"{len(curves)} run" + ("s" if len(curves) > 1 else "")
            axes.plot(x, mean, color=color, label=f"{group.group} ({runs})")
            axes.fill_between(x, mean - half, mean + half, color=color, alpha=0.18, linewidth=0)
    label = result.metric.title or result.name
    axes.set(xlabel=unit, ylabel=f"{label} ({result.metric.unit})" if result.metric.unit else label)
    axes.set_title(result.name + (", best so far" if result.metric.reducer == "best_so_far" else ""), fontsize="medium")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def _best(curve: Curve, result: MetricResult) -> Curve:
    return curve.best_so_far(result.metric.direction) if result.metric.reducer == "best_so_far" else curve


def _colors(count: int) -> list[str]:
    return [COLORS[place % len(COLORS)] for place in range(count)]
