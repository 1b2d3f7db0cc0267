"""The learning curve of a run as a figure, drawn from its `metrics.jsonl`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from query_mutator.lab.analysis.figures import new_figure, save_figure
from query_mutator.lab.analysis.series import Floats, Series
from query_mutator.lab.analysis.tables import read_table

_SMOOTHING = 0.6  # weight of the past in the drawn training curve
_TRAINING, _VALIDATION, _IDENTITY = "#7aa6c2", "#1b4965", "#c1666b"
_EMPTY = Series(np.empty(0, dtype=np.int64), np.empty(0), np.empty(0))


def draw_learning_curve(metrics: Path, path: Path, *, title: str) -> None:
    """Draw success in training, and of policy and original questions in validation, in percent."""
    series = read_table(metrics)
    figure = new_figure(8, 4.5)
    axes = figure.add_subplot()
    training, validation = series.get("charts/success", _EMPTY), series.get("validation/success", _EMPTY)
    percent = 100 * np.array(smoothed(training.value))
    axes.plot(training.step, percent, color=_TRAINING, label="training episodes (smoothed)")
    if len(validation):
        label = "validation questions, greedy policy"
        axes.plot(validation.step, 100 * validation.value, "o-", color=_VALIDATION, label=label)
    if identity := series.get("validation/identity_success"):
        label = "validation questions, unchanged"
        axes.axhline(100 * identity.value[-1], color=_IDENTITY, linestyle="--", label=label)
    axes.set(title=title, xlabel="environment steps", ylabel="right answers (%)", ylim=(0, 100))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    save_figure(figure, path)


def validation_end(metrics: Path, *, fold: int | str) -> dict[str, float | str | None] | None:
    """Return the figures of a run's last periodic evaluation, None without one; a figure it lacks is None."""
    series = {tag: one for tag, one in read_table(metrics).items() if tag.startswith("validation/")}
    if not series or fold == "none":
        return None
    last = max(int(one.step[-1]) for one in series.values())
    figures = {
        tag.partition("/")[2]: float(one.value[-1]) if one.step[-1] == last else None for tag, one in series.items()
    }
    return {"fold": fold, "env_steps": last, **figures}


def smoothed(values: Sequence[float] | Floats, *, weight: float = _SMOOTHING) -> list[float]:
    """Return the exponential moving average, corrected for its start (so the first value is unchanged)."""
    average, total, out = 0.0, 0.0, []
    for value in values:
        average = weight * average + (1 - weight) * value
        total = weight * total + (1 - weight)
        out.append(average / total)
    return out
