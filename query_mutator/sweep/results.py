"""What a sweep found: the numbers of its trials, the optimum, the Pareto front, and one sentence."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from query_mutator.analysis.curves import Curve, curves_of, reduced
from query_mutator.analysis.runs import EVENTS, TABLES, load_run
from query_mutator.analysis.spec import MetricSpec, Spec
from query_mutator.analysis.wording import interval, number
from query_mutator.errors import UsageError
from query_mutator.stats.intervals import BOOTSTRAP_FROM, Interval, mean_interval
from query_mutator.sweep.plan import Setting, Trial, Value
from query_mutator.sweep.runner import SweepFolder
from query_mutator.sweep.surface import Optimum, find_optimum, pareto_front

TOLD = "output"  # source of a number that a trial printed


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The numbers of one trial; None where it told none."""

    trial: Trial
    performance: float | None
    throughput: float | None
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingResult:
    """All seeds of one setting."""

    setting: Setting
    values: tuple[float, ...]
    mean: float
    interval: Interval
    throughput: float
    on_front: bool = False

    @property
    def name(self) -> str:
        """Return the setting in words."""
        return ", ".join(f"{name}={value}" for name, value in self.setting.items())


def measure(
    folder: SweepFolder, trials: Sequence[Trial], spec: Spec, *, metric: str, throughput: str | None, axis: str
) -> list[Measured]:
    """Return the numbers of each trial, read up to where the shortest of them got on the axis.

    A trial tells its numbers in a run folder under its own, or as a JSON object in the last line of its output.
    """
    performance = spec.metric(metric)
    speed = [spec.metric(throughput)] if throughput else [m for m in spec.metrics if m.role == "throughput"]
    curves = {trial.name: _curves(folder.folder_of(trial), [performance, *speed], spec, axis) for trial in trials}
    ends = [found[performance.name].x[-1] for found in curves.values() if performance.name in found]
    end = min(ends, default=math.inf)
    measured = []
    for trial in trials:
        found, told = curves[trial.name], _told(folder.folder_of(trial))
        value = _reading(found.get(metric), performance, end)
        fast = next((_reading(found[m.name], m, end) for m in speed if m.name in found), None)
        named = next((m.name for m in speed if m.name in told), "")
        measured.append(
            Measured(
                trial=trial,
                performance=told.get(metric) if value is None else value,
                throughput=told.get(named) if fast is None else fast,
                source=f"{found[metric].run} {found[metric].tag}" if metric in found else TOLD,
            )
        )
    return measured


def by_setting(measured: Sequence[Measured]) -> list[SettingResult]:
    """Return the results of each setting that any seed has numbers of, Pareto front marked (more is better)."""
    values: dict[tuple[tuple[str, Value], ...], list[Measured]] = {}
    for row in measured:
        if row.performance is not None:
            values.setdefault(tuple(row.trial.setting.items()), []).append(row)
    return [_setting_result(dict(key), rows) for key, rows in values.items()]


def with_front(results: Sequence[SettingResult], *, maximise: bool) -> list[SettingResult]:
    """Return the results with those on the Pareto front of performance against throughput marked."""
    known = [result for result in results if math.isfinite(result.throughput)]
    sign = 1.0 if maximise else -1.0
    front = pareto_front([sign * result.mean for result in known], [result.throughput for result in known])
    names = {known[at].name for at in front} if len(known) == len(results) else set()
    return [
        SettingResult(
            setting=result.setting,
            values=result.values,
            mean=result.mean,
            interval=result.interval,
            throughput=result.throughput,
            on_front=result.name in names,
        )
        for result in results
    ]


def optimum_of(measured: Sequence[Measured], *, maximise: bool) -> Optimum | str:
    """Return the optimum over the settings that are numbers, or why there is none."""
    rows = [row for row in measured if row.performance is not None]
    names = list(rows[0].trial.setting) if rows else []
    levels = {name: {row.trial.setting[name] for row in rows} for name in names}
    varied = [name for name in names if len(levels[name]) > 1]
    words = [name for name in varied if not all(isinstance(value, (int, float)) for value in levels[name])]
    if words:
        return f"no surface: {', '.join(words)} has values that are no numbers"
    if not varied:
        return "no surface: nothing was varied"
    x = np.array([[float(row.trial.setting[name]) for name in varied] for row in rows])
    y = np.array([row.performance for row in rows], dtype=np.float64)
    try:
        return find_optimum(x, y, names=varied, maximise=maximise)
    except ValueError as error:
        return f"no surface: {error}"


def sentence(metric: MetricSpec, found: Optimum | str, results: Sequence[SettingResult]) -> str:
    """Return what was found and how sure it is."""
    best = best_setting(results, found, maximise=metric.direction != "down")
    highest = f"{metric.name} {number(best.mean)} {interval(best.interval)}".strip()
    seeds = f"{len(best.values)} seed" + ("s" if len(best.values) > 1 else "")
    if isinstance(found, str):
        return f"Best measured: {best.name} ({highest}, {seeds}); {found}."
    where = " and ".join(
        f"{axis.name} about {number(axis.best)} "
        f"({found.confidence:.0%} region {number(axis.low)} to {number(axis.high)})"
        for axis in found.axes
    )
    kinds = {
        "interior": "The golden middle is at",
        "edge": "An edge optimum, at",
        "undecided": "Undecided; the best guess is",
    }
    return f"{kinds[found.kind]} {where}: {found.why}. Best measured nearby: {best.name} ({highest}, {seeds})."


def best_setting(results: Sequence[SettingResult], found: Optimum | str, *, maximise: bool) -> SettingResult:
    """Return the setting next to the optimum, else the one with the best mean; UsageError when there is none."""
    if not results:
        raise UsageError("no trial has a number for the metric; see the trials' stderr.txt, or name another --metric")
    if isinstance(found, str):
        sign = 1.0 if maximise else -1.0
        return max(results, key=lambda result: sign * result.mean)
    return min(results, key=lambda result: _distance(result.setting, found))


def _distance(setting: Setting, found: Optimum) -> float:
    return sum((math.log2(float(setting[axis.name])) - math.log2(axis.best)) ** 2 for axis in found.axes)


def _setting_result(setting: Setting, rows: Sequence[Measured]) -> SettingResult:
    values = [row.performance for row in rows if row.performance is not None]
    speeds = [row.throughput for row in rows if row.throughput is not None]
    return SettingResult(
        setting=setting,
        values=tuple(values),
        mean=float(np.mean(values)),
        interval=mean_interval(values, bootstrap_from=BOOTSTRAP_FROM),
        throughput=float(np.mean(speeds)) if speeds else math.nan,
    )


def _curves(folder: Path, metrics: Sequence[MetricSpec], spec: Spec, axis: str) -> dict[str, Curve]:
    path = _run_in(folder)
    if path is None:
        return {}
    run = load_run(path)
    found = {}
    for metric in metrics:
        curves = [curve.finite() for curve in curves_of(run, metric, spec, axis=axis).values()]
        if curves and len(curves[0]):
            found[metric.name] = curves[0]
    return found


def _run_in(folder: Path) -> Path | None:
    """Return the newest folder with numbers under a trial's."""
    files = [file for pattern in (EVENTS, *TABLES) for file in folder.rglob(pattern)]
    if not files:
        return None
    newest = max(files, key=lambda file: file.stat().st_mtime).parent
    return newest.parent if newest.name == "tensorboard" else newest


def _told(folder: Path) -> Mapping[str, float]:
    """Return the numbers in the last line of a trial's output, if that is a JSON object."""
    try:
        lines = (folder / "stdout.txt").read_text(encoding="utf-8", errors="replace").split("\n")
        data = json.loads(next(line for line in reversed(lines) if line.strip()))
    except (OSError, ValueError, StopIteration):
        return {}
    return (
        {key: float(value) for key, value in data.items() if isinstance(value, (int, float))}
        if isinstance(data, dict)
        else {}
    )


def _reading(curve: Curve | None, metric: MetricSpec, end: float) -> float | None:
    if curve is None:
        return None
    value = reduced(curve.until(end), metric).value
    return value if math.isfinite(value) else None
