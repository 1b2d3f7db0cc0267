"""Curves: the mean of each group with its 95 % band, single runs thin behind it; matplotlib without pyplot."""

from __future__ import annotations

import io
from collections.abc import Sequence
from itertools import cycle
from typing import Any

import numpy as np

from query_mutator.lab.analysis.compare import MetricResult
from query_mutator.lab.analysis.curves import Curve
from query_mutator.lab.analysis.events import Floats
from query_mutator.stats.intervals import student_t

__all__ = ["draw_curves"]

_COLORS = ("#1b4965", "#c1666b", "#d4a017", "#2a9d8f", "#7d5ba6", "#6c757d", "#e07a5f", "#457b9d", "#81b29a", "#b5838d")
_POINTS = 200  # of a mean curve
_DRAWN = 2000  # points of one run that are drawn at most


def draw_curves(results: Sequence[MetricResult], *, unit: str, format: str) -> bytes:
    """Return a picture, png or svg, with a panel for each metric."""
    import matplotlib.figure

    matplotlib.rcParams["svg.hashsalt"] = "query-mutator"  # the same curves give the same file
    figure = matplotlib.figure.Figure(figsize=(8, 4.2 * len(results)), dpi=120, layout="constrained")
    for axes, result in zip(figure.subplots(len(results), squeeze=False)[:, 0], results, strict=True):
        _panel(axes, result, unit)
    out = io.BytesIO()
    figure.savefig(out, format=format, metadata={"Date": None} if format == "svg" else None)
    return out.getvalue()


def _panel(axes: Any, result: MetricResult, unit: str) -> None:
    best = ", best so far" if result.metric.reducer == "best_so_far" else ""
    for color, group in zip(cycle(_COLORS), result.groups, strict=False):
        curves = [curve.finite() for name, curve in result.curves if name == group.group]
        curves = [curve.best_so_far(result.metric.direction) if best else curve for curve in curves if len(curve)]
        for curve in curves:
            stride = len(curve) // _DRAWN + 1
            axes.plot(curve.x[::stride], curve.y[::stride], color=color, alpha=0.3, linewidth=0.8)
        if curves:
            x, mean, half = _mean_and_band(curves)
            runs = f"{len(curves)} run" + ("s" if len(curves) > 1 else "")
            axes.plot(x, mean, color=color, label=f"{group.group} ({runs})")
            low, high = result.metric.bounds
            band = (np.maximum(mean - half, np.minimum(mean, low)), np.minimum(mean + half, np.maximum(mean, high)))
            axes.fill_between(x, *band, color=color, alpha=0.18, linewidth=0)
    label = result.metric.title or result.name
    axes.set(xlabel=unit, ylabel=f"{label} ({result.metric.unit})" if result.metric.unit else label)
    axes.set_title(result.name + best, fontsize="medium")
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:  # none without a finite value
        axes.legend(fontsize="small")


def _mean_and_band(curves: Sequence[Curve]) -> tuple[Floats, Floats, Floats]:
    """Return x, mean and half width of the 95 % t interval over runs, where all runs have values."""
    low, high = max(curve.x[0] for curve in curves), min(curve.x[-1] for curve in curves)
    x = np.linspace(low, high, _POINTS if high >= low else 0)
    values = np.stack([np.interp(x, curve.x, curve.y) for curve in curves])
    half = np.zeros(len(x))
    if len(curves) > 1:
        half = student_t(len(curves) - 1) * values.std(axis=0, ddof=1) / np.sqrt(len(curves))
    return x, values.mean(axis=0), half
