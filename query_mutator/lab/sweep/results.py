"""The numbers of a sweep's trials, by setting, with the optimum, and one sentence."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from query_mutator.errors import UsageError
from query_mutator.lab.analysis.curves import Curve, curves_of, reduced
from query_mutator.lab.analysis.report import interval, number
from query_mutator.lab.analysis.runs import load_run, newest_run
from query_mutator.lab.analysis.spec import MetricSpec, Spec
from query_mutator.lab.sweep.running import SweepFolder
from query_mutator.lab.sweep.surface import Optimum, find_optimum
from query_mutator.lab.sweep.trials import Setting, Trial, Value
from query_mutator.stats.intervals import WHOLE_LINE, Interval, mean_interval

__all__ = ["Measured", "SettingResult", "best_setting", "by_setting", "measure", "optimum_of", "sentence"]

_MOST = 1e300  # printed numbers are below: NaN, infinity and integers beyond floats are not

_KINDS = {
    "interior": "The golden middle is at",
    "edge": "An edge optimum, at",
    "near": "Perhaps an edge optimum; the best guess is",
    "coarse": "The grid is too coarse; the best guess is",
    "undecided": "Undecided; the best guess is",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The numbers of one trial; None where it has none."""

    trial: Trial
    performance: float | None
    throughput: float | None
    has_diverged: bool = False  # its metric ends in NaN or infinity


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingResult:
    """All seeds and folds of one setting."""

    setting: Setting
    values: tuple[float, ...]
    mean: float
    interval: Interval
    throughput: float
    folds: int = 1
    diverged: int = 0  # trials whose metric ends in NaN or infinity

    @property
    def name(self) -> str:
        """Return the setting in words."""
        return ", ".join(f"{name}={value}" for name, value in self.setting.items()) or "the command"

    @property
    def repeats(self) -> str:
        """Return what its values come from, in words."""
        lost = f", {self.diverged} more diverged" if self.diverged else ""
        if self.folds > 1:
            return f"{len(self.values)} runs over {self.folds} validation folds{lost}"
        return f"{len(self.values)} seed{'s' if len(self.values) > 1 else ''}{lost}"


def measure(
    folder: SweepFolder,
    trials: Sequence[Trial],
    metric: MetricSpec,
    speeds: Sequence[MetricSpec],
    spec: Spec,
    *,
    axis: str,
) -> list[Measured]:
    """Return the numbers of each trial, read up to the end of the shortest one on the axis.

    A trial writes them to a run folder under its own, or prints a JSON object as the last line of its output. Its
    throughput is the first of `speeds` that it has.
    """
    all_curves = [_curves(folder.folder_of(trial), [metric, *speeds], spec, axis) for trial in trials]
    logged = [curves[metric.name] for curves in all_curves if metric.name in curves]
    end = min((curve.x[-1] for curve in logged if curve.diverged_at is None), default=math.inf)
    measured = []
    for trial, curves in zip(trials, all_curves, strict=True):
        readings = {one.name: _reading(curves[one.name], one, end) for one in [metric, *speeds] if one.name in curves}
        numbers = _printed(folder.folder_of(trial)) | readings
        sound = {name: number for name, number in numbers.items() if abs(number) < _MOST}  # NaN is not below
        curve, number = curves.get(metric.name), numbers.get(metric.name)
        measured.append(
            Measured(
                trial=trial,
                performance=sound.get(metric.name),
                throughput=next((sound[one.name] for one in speeds if one.name in sound), None),
                has_diverged=metric.name not in sound and (curve.diverged_at if curve else number) is not None,
            )
        )
    return measured


def by_setting(measured: Sequence[Measured], *, bounds: Interval = WHOLE_LINE) -> list[SettingResult]:
    """Return the result of each setting with a number; intervals of several trials stay within `bounds`."""
    rows_of: dict[tuple[tuple[str, Value], ...], list[Measured]] = {}
    for row in measured:
        rows_of.setdefault(tuple(row.trial.setting.items()), []).append(row)
    return [
        _setting_result(dict(key), rows, bounds)
        for key, rows in rows_of.items()
        if any(row.performance is not None or row.has_diverged for row in rows)
    ]


def _setting_result(setting: Setting, rows: Sequence[Measured], bounds: Interval) -> SettingResult:
    values = [row.performance for row in rows if row.performance is not None and not row.has_diverged]
    speeds = [row.throughput for row in rows if row.throughput is not None]
    return SettingResult(
        setting=setting,
        values=tuple(values),
        mean=float(np.mean(values)) if values else math.nan,
        interval=mean_interval(values, bounds=bounds if len(values) > 1 else WHOLE_LINE) if values else WHOLE_LINE,
        throughput=float(np.mean(speeds)) if speeds else math.nan,
        folds=len({row.trial.fold for row in rows}),
        diverged=sum(row.has_diverged for row in rows),
    )


def optimum_of(measured: Sequence[Measured], *, maximize: bool) -> Optimum | str:
    """Return the optimum over the numeric settings in which no trial diverged, or why there is none."""
    lost = [row.trial.setting for row in measured if row.has_diverged]
    rows = [row for row in measured if row.performance is not None and row.trial.setting not in lost]
    names = list(rows[0].trial.setting) if rows else []
    levels = {name: {row.trial.setting[name] for row in rows} for name in names}
    varied = [name for name in names if len(levels[name]) > 1]
    words = [name for name in varied if not all(isinstance(value, (int, float)) for value in levels[name])]
    if words:
        return f"no surface: {', '.join(words)} has values that are not numbers"
    if not varied:
        return "no surface: nothing was varied"
    x = np.array([[float(row.trial.setting[name]) for name in varied] for row in rows])
    y = np.array([row.performance for row in rows], dtype=np.float64)
    try:
        return find_optimum(x, y, names=varied, maximize=maximize)
    except ValueError as error:
        return f"no surface: {error}"


def best_setting(results: Sequence[SettingResult], found: Optimum | str, *, maximize: bool) -> SettingResult:
    """Return the setting next to the optimum, else (as on a coarse grid) the best mean; UsageError for no result."""
    results = [result for result in results if not result.diverged]
    if not results:
        raise UsageError(
            "no setting has a finite number for the metric from each trial; see the trials' stderr.txt, or name "
            "another --metric"
        )
    if isinstance(found, str):
        return max(results, key=lambda result: (1.0 if maximize else -1.0) * result.mean)

    def octaves(result: SettingResult) -> float:
        """Return the squared distance from the optimum."""
        return sum(math.log2(float(result.setting[axis.name]) / axis.best) ** 2 for axis in found.axes)

    return min(results, key=octaves)


def sentence(metric: MetricSpec, found: Optimum | str, best: SettingResult) -> str:
    """Return what was found and how certain it is; `best` is the best measured setting."""
    measured = f"{metric.name} {number(best.mean)} {interval(best.interval)}".strip()
    measured = f"{best.name} ({measured}, {best.repeats})"
    if isinstance(found, str):
        return f"Best measured: {measured}; {found}."
    where = " and ".join(
        f"{axis.name} about {number(axis.best)} "
        f"({found.confidence:.0%} region {number(axis.low)} to {number(axis.high)})"
        for axis in found.axes
    )
    kind = found.kind if found.kind != "edge" or any(axis.at_edge for axis in found.axes) else "near"
    return f"{_KINDS[kind]} {where}: {found.why}. Best measured nearby: {measured}."


# --- the numbers of a trial -------------------------------------------------------------------------------------------


def _curves(folder: Path, metrics: Sequence[MetricSpec], spec: Spec, axis: str) -> dict[str, Curve]:
    """Return metric -> curve of the newest run under a trial's folder."""
    path = newest_run(folder)
    if path is None:
        return {}
    run = load_run(path)
    found = {metric.name: next(iter(curves_of(run, metric, spec, axis=axis).values()), None) for metric in metrics}
    return {name: curve for name, curve in found.items() if curve is not None and len(curve)}


def _printed(folder: Path) -> dict[str, float]:
    """Return the numbers in the last line of a trial's output, if that is a JSON object."""
    try:
        text = (folder / "stdout.txt").read_text(encoding="utf-8", errors="replace")
        data = json.loads(text.rstrip().rpartition("\n")[2])
    except (OSError, ValueError, RecursionError):
        return {}
    pairs = data.items() if isinstance(data, dict) else ()
    numbers = {key: value for key, value in pairs if isinstance(value, (int, float))}
    return {key: float(value) if abs(value) < _MOST else math.nan for key, value in numbers.items()}


def _reading(curve: Curve, metric: MetricSpec, end: float) -> float:
    return math.nan if curve.diverged_at is not None else reduced(curve.until(end), metric).value
