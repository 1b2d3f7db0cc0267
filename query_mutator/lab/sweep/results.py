"""The numbers of a sweep's trials, by setting, with the Pareto front, the optimum, and one sentence."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from query_mutator.errors import UsageError
from query_mutator.lab.analysis.curves import Curve, curves_of, reduced
from query_mutator.lab.analysis.runs import load_run, newest_run
from query_mutator.lab.analysis.spec import MetricSpec, Spec
from query_mutator.lab.analysis.wording import interval, number
from query_mutator.lab.sweep.config import SweepFlags
from query_mutator.lab.sweep.plan import Setting, Trial, Value
from query_mutator.lab.sweep.runner import SweepFolder
from query_mutator.lab.sweep.surface import Optimum, find_optimum, pareto_front
from query_mutator.stats.intervals import WHOLE_LINE, Interval, mean_interval

__all__ = ["PRINTED", "Measured", "SettingResult", "best_setting", "by_setting", "measure", "optimum_of", "sentence"]

PRINTED = "output"  # source of a number that a trial printed
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
    source: str
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
    on_front: bool = False
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


def measure(folder: SweepFolder, trials: Sequence[Trial], spec: Spec, flags: SweepFlags) -> list[Measured]:
    """Return the numbers of each trial, read up to the end of the shortest one on --axis.

    A trial writes them to a run folder under its own, or prints a JSON object as the last line of its output.
    """
    metric = spec.metric(flags.metric)
    speeds = [m for m in spec.metrics if (m.name == flags.throughput if flags.throughput else m.role == "throughput")]
    curves = {trial.name: _curves(folder.folder_of(trial), [metric, *speeds], spec, flags.axis) for trial in trials}
    logged = [found[metric.name] for found in curves.values() if metric.name in found]
    end = min((curve.x[-1] for curve in logged if curve.diverged_at is None), default=math.inf)

    def value(trial: Trial, metrics: Sequence[MetricSpec]) -> float | None:
        """Return the first of the metrics that the trial logged, else the first that it printed."""
        found, printed = curves[trial.name], _printed(folder.folder_of(trial))
        logged = next((_reading(found[m.name], m, end) for m in metrics if m.name in found), None)
        shown = next((printed[m.name] for m in metrics if m.name in printed), None) if logged is None else logged
        return shown if shown is not None and abs(shown) < _MOST else None  # NaN is not below

    return [
        Measured(
            trial=trial,
            performance=value(trial, [metric]),
            throughput=value(trial, speeds),
            source=f"{curve.run} {curve.tag}" if (curve := curves[trial.name].get(metric.name)) else PRINTED,
            has_diverged=_has_diverged(curve, _printed(folder.folder_of(trial)).get(metric.name)),
        )
        for trial in trials
    ]


def _has_diverged(curve: Curve | None, printed: float | None) -> bool:
    """Return whether the logged metric, or the printed one where none was logged, ends in NaN or infinity."""
    if curve is not None:
        return curve.diverged_at is not None
    return printed is not None and not abs(printed) < _MOST


def by_setting(measured: Sequence[Measured], *, maximize: bool, bounds: Interval = WHOLE_LINE) -> list[SettingResult]:
    """Return the result of each setting with a number, those on the Pareto front against throughput marked.

    A setting in which a trial diverged is never on it.

    Intervals of several trials stay within `bounds`.
    """
    rows_of: dict[tuple[tuple[str, Value], ...], list[Measured]] = {}
    for row in measured:
        rows = rows_of.setdefault(tuple(row.trial.setting.items()), [])
        rows.append(row)
    results = [
        _setting_result(dict(key), rows, bounds)
        for key, rows in rows_of.items()
        if any(row.performance is not None or row.has_diverged for row in rows)
    ]
    sound = [result for result in results if not result.diverged]
    if not all(math.isfinite(result.throughput) for result in sound):
        return results
    sign = 1.0 if maximize else -1.0
    front = pareto_front([sign * result.mean for result in sound], [result.throughput for result in sound])
    on_front = [sound[place] for place in front]
    return [replace(result, on_front=any(result is one for one in on_front)) for result in results]


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
    sign = 1.0 if maximize else -1.0
    if isinstance(found, str):
        return max(results, key=lambda result: sign * result.mean)
    if found.plateaus:
        return _cheapest(results, found)
    if found.ridge is not None:
        line = found.ridge
        on_it = [result for result in results if line.holds(result.setting)] or results
        return max(on_it, key=lambda result: sign * result.mean)
    return min(results, key=lambda result: _distance(result.setting, found))


def sentence(metric: MetricSpec, found: Optimum | str, best: SettingResult) -> str:
    """Return what was found and how certain it is; `best` is the best measured setting."""
    measured = f"{metric.name} {number(best.mean)} {interval(best.interval)}".strip()
    measured = f"{best.name} ({measured}, {best.repeats})"
    if isinstance(found, str):
        return f"Best measured: {measured}; {found}."
    if found.ridge is not None:
        line, region = found.ridge, f"{found.confidence:.0%} region"
        about = f"{line.formula} about {number(line.best)} ({region} {number(line.low)} to {number(line.high)})"
        return f"A ridge, {about}: {found.why}. Best measured along it: {measured}."
    if found.plateaus:
        return (
            f"A plateau: {found.why}. {'Fastest' if math.isfinite(best.throughput) else 'Measured'} there: {measured}."
        )
    where = " and ".join(
        f"{axis.name} about {number(axis.best)} "
        f"({found.confidence:.0%} region {number(axis.low)} to {number(axis.high)})"
        for axis in found.axes
    )
    kind = found.kind if found.kind != "edge" or any(axis.at_edge for axis in found.axes) else "near"
    return f"{_KINDS[kind]} {where}: {found.why}. Best measured nearby: {measured}."


def _cheapest(results: Sequence[SettingResult], found: Optimum) -> SettingResult:
    """Return the fastest setting of a plateau, or the smallest where throughput was not measured."""
    flats = {flat.name: flat for flat in found.plateaus}
    others = [axis for axis in found.axes if axis.name not in flats]

    def off_it(result: SettingResult) -> float:
        """Return how far a setting is from the best along the axes without a plateau."""
        return sum(_octaves(result.setting, axis.name, axis.best) for axis in others)

    on_it = [result for result in results if all(flat.holds(result.setting[name]) for name, flat in flats.items())]
    nearest = min(map(off_it, on_it))
    on_it = [result for result in on_it if off_it(result) <= nearest]
    if all(math.isfinite(result.throughput) for result in on_it):
        return max(on_it, key=lambda result: result.throughput)
    return min(on_it, key=lambda result: [float(result.setting[name]) for name in flats])


def _distance(setting: Setting, found: Optimum) -> float:
    return sum(_octaves(setting, axis.name, axis.best) for axis in found.axes)


def _octaves(setting: Setting, name: str, to: float) -> float:
    """Return the squared distance of a setting from a place on one axis."""
    return (math.log2(float(setting[name])) - math.log2(to)) ** 2


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


# --- the numbers of a trial -------------------------------------------------------------------------------------------


def _curves(folder: Path, metrics: Sequence[MetricSpec], spec: Spec, axis: str) -> dict[str, Curve]:
    """Return metric -> curve of the newest run under a trial's folder."""
    path = newest_run(folder)
    if path is None:
        return {}
    run = load_run(path)
    found = {}
    for metric in metrics:
        curve = next(iter(curves_of(run, metric, spec, axis=axis).values()), None)
        if curve is not None and len(curve):
            found[metric.name] = curve
    return found


def _printed(folder: Path) -> Mapping[str, float]:
    """Return the numbers in the last line of a trial's output, if that is a JSON object."""
    try:
        text = (folder / "stdout.txt").read_text(encoding="utf-8", errors="replace")
        data = json.loads(text.rstrip().rpartition("\n")[2])
    except (OSError, ValueError, RecursionError):
        return {}
    pairs = data.items() if isinstance(data, dict) else ()
    numbers = {key: value for key, value in pairs if isinstance(value, (int, float))}
    return {key: float(value) if abs(value) < _MOST else math.nan for key, value in numbers.items()}


def _reading(curve: Curve, metric: MetricSpec, end: float) -> float | None:
    if curve.diverged_at is not None:
        return math.nan
    value = reduced(curve.until(end), metric).value
    return value if math.isfinite(value) else None
