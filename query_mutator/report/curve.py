"""The learning curve of a run as a picture, drawn from the rows of its `metrics.jsonl` alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from query_mutator.files import disk_errors

Row = Mapping[str, Any]
Series = tuple[list[float], list[float]]  # steps, values

SMOOTHING = 0.6  # weight of the past in the drawn training curve
_TRAINING, _HELD_OUT, _IDENTITY = "#7aa6c2", "#1b4965", "#c1666b"


def series(rows: Sequence[Row], key: str) -> Series:
    """Return the steps and values of the rows that have `key`."""
    found = [(float(row["step"]), float(row[key])) for row in rows if key in row]
    return [step for step, _ in found], [value for _, value in found]


def smoothed(values: Sequence[float], *, weight: float = SMOOTHING) -> list[float]:
    """Return the exponential moving average, corrected for its start (so the first value stays itself)."""
    average, total, out = 0.0, 0.0, []
    for value in values:
        average = weight * average + (1 - weight) * value
        total = weight * total + (1 - weight)
        out.append(average / total)
    return out


def draw_learning_curve(rows: Sequence[Row], path: Path, *, title: str) -> Path:
    """Write a PNG: success in training, on held-out questions, and with every question left as it stands (per cent)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)  # no window, whatever the machine's default is
    axes = figure.add_subplot()
    steps, training = series(rows, "charts/success")
    axes.plot(steps, _percent(smoothed(training)), color=_TRAINING, label="training episodes (smoothed)")
    steps, held_out = series(rows, "eval/success")
    axes.plot(steps, _percent(held_out), "o-", color=_HELD_OUT, label="held-out questions, greedy policy")
    _, identity = series(rows, "eval/identity_success")
    if identity:
        axes.axhline(100 * identity[-1], color=_IDENTITY, linestyle="--", label="held-out questions as they stand")
    axes.set(title=title, xlabel="environment steps", ylabel="right answers (%)", ylim=(0, 100))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    with disk_errors(path):
        figure.savefig(path)
    return path


def _percent(values: Sequence[float]) -> list[float]:
    return [100 * value for value in values]
