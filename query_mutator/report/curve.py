"""The learning curve of a run as a figure, drawn from its `metrics.jsonl`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from query_mutator.analysis.figures import new_figure, save_figure
from query_mutator.analysis.series import Floats, Series
from query_mutator.analysis.tables import read_table

__all__ = ["draw_learning_curve", "smoothed"]

_SMOOTHING = 0.6  # weight of the past in the drawn training curve
_TRAINING, _HELD_OUT, _IDENTITY = "#7aa6c2", "#1b4965", "#c1666b"
_EMPTY = Series(np.empty(0, dtype=np.int64), np.empty(0), np.empty(0))


def draw_learning_curve(metrics: Path, path: Path, *, title: str) -> None:
    """Draw success in training, on held-out questions, and with the original questions, in percent."""
    series = read_table(metrics)
    figure = new_figure(8, 4.5)
    axes = figure.add_subplot()
    training, held_out = series.get("charts/success", _EMPTY), series.get("eval/success", _EMPTY)
    percent = 100 * np.array(smoothed(training.value))
    axes.plot(training.step, percent, color=_TRAINING, label="training episodes (smoothed)")
    axes.plot(held_out.step, 100 * held_out.value, "o-", color=_HELD_OUT, label="held-out questions, greedy policy")
    if identity := series.get("eval/identity_success"):
        label = "held-out questions, unchanged"
        axes.axhline(100 * identity.value[-1], color=_IDENTITY, linestyle="--", label=label)
    axes.set(title=title, xlabel="environment steps", ylabel="right answers (%)", ylim=(0, 100))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    save_figure(figure, path)


def smoothed(values: Sequence[float] | Floats, *, weight: float = _SMOOTHING) -> list[float]:
    """Return the exponential moving average, corrected for its start (so the first value is unchanged)."""
    average, total, out = 0.0, 0.0, []
    for value in values:
        average = weight * average + (1 - weight) * value
        total = weight * total + (1 - weight)
        out.append(average / total)
    return out
