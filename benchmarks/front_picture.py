"""The front of `benchmarks/eight_seeds.py` as a picture: success against total calls per question."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from query_mutator.lab.analysis.figures import new_figure, save_figure

__all__ = ["draw_front"]

_PLAN, _BEST_OF_K, _POLICY, _IDENTITY = "#1b4965", "#8d99ae", "#c8553d", "#444444"
_MOST_CALLS = 8


def draw_front(found: Mapping[str, Any], path: Path) -> None:
    """Draw a panel for each set of questions of a report."""
    labels = [label for label in found["questions"] if len(found["questions"]) == 1 or label != "all questions"]
    figure = new_figure(5.2 * len(labels), 4.2)
    panels = figure.subplots(1, len(labels), squeeze=False, sharey=True)[0]
    for axes, label in zip(panels, labels, strict=True):
        _panel(axes, found, label)
    panels[0].set_ylabel("right answers (%)")
    panels[-1].legend(loc="lower right", fontsize=9)
    save_figure(figure, path)


def _panel(axes: Any, found: Mapping[str, Any], label: str) -> None:
    methods = found["methods"]
    for name, rows, color, marker in (
        ("best plan within a budget", found["plans"].values(), _PLAN, "s"),
        ("best of k", [methods["identity"], *found["best_of_k"].values()], _BEST_OF_K, "o"),
    ):
        points = sorted({(row[label]["calls"], 100 * row[label]["success"]) for row in rows})
        points = [point for point in points if point[0] <= _MOST_CALLS]
        axes.plot(*zip(*points, strict=True), marker=marker, markersize=5, color=color, label=name)
    seeds = [(row["calls"][label], 100 * row["success"][label]) for row in found["by_seed"]]
    axes.scatter(*zip(*seeds, strict=True), s=14, color=_POLICY, alpha=0.45, linewidths=0)
    policy = methods["policy"][label]
    axes.errorbar(
        [policy["calls"]],
        [100 * policy["success"]],
        yerr=_margins(policy["success"], policy["success_ci"]),
        fmt="D",
        markersize=7,
        capsize=3,
        color=_POLICY,
        label=f"policy, mean of {len(seeds)} seeds (95 %)",
    )
    identity = methods["identity"][label]
    axes.plot(
        [identity["calls"]],
        [100 * identity["success"]],
        "X",
        markersize=8,
        color=_IDENTITY,
        linestyle="none",
        label="original question",
    )
    axes.set(title=f"{label}: {found['questions'][label]} questions", xlabel="model calls per question, all counted")
    axes.set_xlim(0.5, _MOST_CALLS + 0.5)
    axes.set_ylim(0, 80)
    axes.grid(alpha=0.3)


def _margins(value: float, interval: Sequence[float]) -> list[list[float]]:
    low, high = interval
    return [[100 * (value - low)], [100 * (high - value)]]
