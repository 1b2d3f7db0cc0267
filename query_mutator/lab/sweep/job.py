"""One sweep: run the trials, read their numbers, extend the grid or let Optuna search, estimate the optimum."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from cyclopts import Parameter

from query_mutator.bounds import Count, Few, FewOrNone, Positive, Prose, Seed
from query_mutator.cli.console import note, table
from query_mutator.cli.flags import Positional
from query_mutator.cli.outputs import JsonTo, Output
from query_mutator.errors import UsageError, hide_credentials
from query_mutator.lab.analysis.curves import Curve, curves_of, reduced
from query_mutator.lab.analysis.events import Reducer
from query_mutator.lab.analysis.report import interval, number
from query_mutator.lab.analysis.runs import load_run, newest_run
from query_mutator.lab.analysis.spec import MetricSpec, Spec, read_spec
from query_mutator.lab.sweep.surface import Optimum, find_optimum
from query_mutator.lab.sweep.trials import (
    FOLD,
    Ended,
    Engine,
    EngineFlags,
    Setting,
    SweepFolder,
    Trial,
    Value,
    command_of,
    extended,
    grid_settings,
    is_sweep,
    parse_grid,
    parse_ranges,
    random_settings,
    run_trials,
    trials_of,
)
from query_mutator.stats import WHOLE_LINE, Interval, mean_interval

__all__ = [
    "Findings", "Measured", "SettingResult", "Sweep", "SweepFlags", "best_setting", "by_setting", "measure",
    "optimum_of", "sentence",
]  # fmt: skip

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


@dataclass(frozen=True, kw_only=True)
class SweepFlags(EngineFlags):
    """Run a command over settings and seeds, and estimate which setting is best and how certain that is.

    Everything after a bare -- is the command. Each trial gets the flags of its setting and --seed; {name}, {seed} and
    {dir} in the command are replaced instead. Rerun the command to resume an interrupted sweep.
    """

    FIRST: ClassVar[tuple[str, ...]] = (
        "command", "grid", "random", "trials", "seeds", "jobs", "engine", "dir", "retry_failed", "dry_run", "metric",
        "confirm", "json",
    )  # fmt: skip

    command: Positional[tuple[Prose, ...]] = ()
    """The command, after a bare --."""
    grid: tuple[str, ...] = ()
    """NAME=VALUE,VALUE: values of the flag --NAME (_ for -); may be given several times."""
    random: tuple[str, ...] = ()
    """NAME=LOW:HIGH: sample log-uniformly, with --trials."""
    sampler: Literal["random", "optuna"] = "random"
    """How --random samples: independently, or with Optuna's search (needs the optuna package)."""
    trials: Few = 20
    """Settings that --random samples."""
    seeds: Few = 3
    """Seeds of each setting."""
    first_seed: Seed = 1
    """The first seed."""
    seed_step: Count = 1000
    """Distance between two seeds. Many trainers give environment i the seed plus i, so runs with neighboring seeds
    share most of their environments and are not independent repeats."""
    timeout_min: Positive | None = None
    """Minutes after which a trial is killed and counted as failed."""
    dir: Annotated[str, Parameter(name=("--out", "--dir")), Output(is_sweep, is_folder=True, resumes=True)] = (
        "sweeps/sweep"
    )
    """Folder of the sweep; the trials write under it."""
    dry_run: bool = False
    """Print the commands and exit."""
    metric: str = "success"
    """Performance metric, named as in the metric file, or as the command prints it."""
    reducer: Reducer | None = None
    """How a trial's curve of it becomes one number, such as auc; by default as in the metric file."""
    axis: str = "step"
    """Axis of the budget at which trials are compared: all are read up to the end of the shortest."""
    spec: str | None = None
    """Metric file (YAML), as for qm analyze."""
    extend: FewOrNone = 0
    """How many times the grid may be extended at an end where the best setting lies."""
    confirm: FewOrNone = 0
    """Fresh seeds for the best setting, for a figure without the selection bias of choosing it."""
    json: JsonTo = None
    """File for the results, by default results.json in --out; without FILE, or with -, print them in place of text."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.command:
            raise ValueError(
                "no command is given; write it after --, as: qm sweep --grid lr=1e-3,1e-2 -- python train.py"
            )
        if bool(self.grid) == bool(self.random):
            raise ValueError("give either --grid NAME=VALUE,VALUE or --random NAME=LOW:HIGH")

    @property
    def trial_seeds(self) -> range:
        """Return the seeds of every setting."""
        return range(self.first_seed, self.first_seed + self.seeds * self.seed_step, self.seed_step)

    @property
    def fresh_seeds(self) -> range:
        """Return the seeds of --confirm, none of which was used to choose the best setting."""
        return range(self.trial_seeds.stop, self.trial_seeds.stop + self.confirm * self.seed_step, self.seed_step)


@dataclass(frozen=True, kw_only=True)
class Findings:
    """Findings of a sweep; `says` are its sentences, `optimum` is a text where there is no response surface."""

    metric: MetricSpec
    trials: Sequence[Trial]
    measured: Sequence[Measured]
    failed: Sequence[Ended]
    results: Sequence[SettingResult]
    optimum: Optimum | str
    says: Sequence[str]

    def table(self) -> str:
        """Return a row for each setting as a plain-text table."""
        names = list(self.results[0].setting)
        rows = [
            (
                *(str(result.setting[name]) for name in names),
                f"{len(result.values)} of {sum(trial.setting == result.setting for trial in self.trials)}",
                f"{number(result.mean)} {interval(result.interval)}".strip(),
                number(result.throughput),
            )
            for result in self.results
        ]
        header = (*names, "runs", f"{self.metric.name} [95 %]", "throughput")
        return table(f"{len(self.results)} settings", header, rows)

    def as_json(self) -> dict[str, Any]:
        """Return everything as data for results.json."""
        return {
            "metric": self.metric.name,
            "sentence": self.says,
            "optimum": self.optimum if isinstance(self.optimum, str) else asdict(self.optimum),
            "settings": [asdict(result) for result in self.results],
            "trials": [asdict(row) for row in self.measured],
            "failed": [asdict(row) for row in self.failed],
        }


class Sweep:
    """Plan a sweep from its flags, and run it. UsageError for flags that make no plan."""

    def __init__(self, flags: SweepFlags) -> None:
        self.flags, self.spec, self.folder = flags, _spec(flags), Path(flags.dir)
        self.metric = self.spec.metric(flags.metric)
        self.grid, self.ranges = parse_grid(flags.grid), parse_ranges(flags.random)
        self.folds: Sequence[Value | None] = self.grid.pop(FOLD, (None,))
        settings = grid_settings(self.grid) if flags.grid else random_settings(self.ranges, count=flags.trials)
        self.trials = trials_of(settings, flags.trial_seeds, folds=self.folds)

    def commands(self) -> list[str]:
        """Return the command line of every planned trial."""
        folder = self.folder / "trials"
        return [shlex.join(command_of(trial, self.flags.command, folder / trial.name)) for trial in self.trials]

    def run(self, engine: Engine) -> Findings:
        """Run the missing trials, extending the grid and confirming the best setting as the flags say."""
        flags, self._engine = self.flags, engine
        self._folder = SweepFolder(self.folder, command=hide_credentials(shlex.join(flags.command)))
        if flags.sampler == "optuna" and self.ranges:
            self.trials = trials_of(self._optuna_settings(), flags.trial_seeds)
        self._run(self.trials)
        for _ in range(flags.extend if self.grid else 0):
            if not self._extend_grid():
                break
        measured = self._measured(self.trials)
        results, optimum = self._results(measured), optimum_of(measured, maximize=self.metric.more_is_better)
        failed = self._failed()
        for one in failed:
            note(f"{one.name}: {one.status} (exit code {one.exit_code}): {one.says or 'stderr is empty'}")
        if failed:
            note(f"their output is under {self.folder / 'trials'}")
        best = best_setting(results, optimum, maximize=self.metric.more_is_better)
        return Findings(
            metric=self.metric,
            trials=self.trials,
            measured=measured,
            failed=failed,
            results=results,
            optimum=optimum,
            says=[sentence(self.metric, optimum, best), *([self._confirm(best)] if flags.confirm else [])],
        )

    def _run(self, trials: Sequence[Trial]) -> None:
        flags = self.flags
        run_trials(
            self._folder,
            self._engine,
            trials,
            command=flags.command,
            timeout_s=flags.timeout_min * 60 if flags.timeout_min else None,
            again={one.name for one in self._failed()} if flags.retry_failed else (),
        )

    def _failed(self) -> list[Ended]:
        """Return the planned trials that failed, as those do that have no finite number where others have one."""
        ended, rows = self._folder.ended(), self._measured(self.trials)
        lost = [row.trial.name for row in rows if row.performance is None]
        says = f"its {self.metric.name} is missing, NaN or infinite"
        failed = [one for trial in self.trials if (one := ended.get(trial.name)) and one.status != "done"]
        without = [replace(ended[name], status="failed", says=says) for name in lost if len(lost) < len(rows)]
        return [*failed, *without]

    def _measured(self, trials: Sequence[Trial]) -> list[Measured]:
        """Return the numbers of the trials that succeeded."""
        ended, flags = self._folder.ended(), self.flags
        done = [trial for trial in trials if trial.name in ended and ended[trial.name].status == "done"]
        speeds = [metric for metric in self.spec.metrics if metric.role == "throughput"]
        return measure(self._folder, done, self.metric, speeds, self.spec, axis=flags.axis)

    def _results(self, measured: Sequence[Measured]) -> list[SettingResult]:
        return by_setting(measured, bounds=self.metric.bounds)

    def _extend_grid(self) -> bool:
        """Add a value at each end of the grid where the optimum lies, and run it; return whether there was one."""
        found = optimum_of(self._measured(self.trials), maximize=self.metric.more_is_better)
        if isinstance(found, str) or found.kind != "edge":
            return False
        ends = {axis.name: axis.end for axis in found.axes if axis.end}
        added = {name: new for name, end in ends.items() if (new := extended(self.grid[name], end)) is not None}
        if not added:
            return False
        self.grid = {n: (*values, added[n]) if n in added else values for n, values in self.grid.items()}
        note(f"the best setting lies at an end of the grid; extended to {self.grid}")
        self.trials = trials_of(grid_settings(self.grid), self.flags.trial_seeds, folds=self.folds)
        self._run(self.trials)
        return True

    def _confirm(self, best: SettingResult) -> str:
        """Run the best setting with fresh seeds; return how it did."""
        fresh = trials_of([best.setting], self.flags.fresh_seeds, folds=self.folds)
        self._run(fresh)
        results = self._results(self._measured(fresh))
        if not results:
            return "Not confirmed: no fresh seed of the best setting has a number."
        again = results[0]
        return (
            f"Confirmed with {again.repeats.replace('seed', 'fresh seed')}: {best.name} has {self.metric.name} "
            f"{number(again.mean)} {interval(again.interval)} (in the sweep {number(best.mean)})."
        )

    def _optuna_settings(self) -> list[Setting]:
        """Return the settings that Optuna chooses by the means of earlier ones, as many at a time as the engine runs.

        Its seed is fixed and no trial is run twice, so the same command resumes the search.
        """
        optuna, settings = _optuna(), list[Setting]()
        sampler = optuna.samplers.TPESampler(seed=0, multivariate=True, constant_liar=True)
        direction = "maximize" if self.metric.more_is_better else "minimize"
        study = optuna.create_study(direction=direction, sampler=sampler)
        axes = {name: _distribution(optuna, *ends) for name, ends in self.ranges.items()}
        while (missing := self.flags.trials - len(study.trials)) > 0:
            asked = [study.ask(axes) for _ in range(min(self._engine.slots, missing))]
            chosen = [{name: _rounded(value) for name, value in trial.params.items()} for trial in asked]
            for trial, value in zip(asked, self._means(chosen), strict=True):
                study.tell(trial, value, state=optuna.trial.TrialState.FAIL if value is None else None)
            settings += chosen
        return settings

    def _means(self, settings: Sequence[Setting]) -> list[float | None]:
        """Run settings; return the mean of each over its seeds, None where no trial has a number."""
        batch = trials_of(settings, self.flags.trial_seeds)
        self._run(batch)
        results = [result for result in self._results(self._measured(batch)) if not result.diverged]
        means = {tuple(result.setting.items()): result.mean for result in results}
        return [means.get(tuple(setting.items())) for setting in settings]


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise UsageError("--sampler optuna needs the package optuna; pip install 'query-mutator[optuna]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _distribution(optuna: Any, low: float, high: float) -> Any:
    whole = isinstance(low, int) and isinstance(high, int)
    kind: Callable[..., Any] = getattr(optuna.distributions, f"{'Int' if whole else 'Float'}Distribution")
    return kind(low, high, log=True)


def _rounded(value: float) -> float:
    return value if isinstance(value, int) else float(f"{value:.4g}")


def _spec(flags: SweepFlags) -> Spec:
    """Return the metric file with --reducer applied; UsageError for an unknown metric."""
    spec = read_spec(flags.spec)
    metric = spec.metric(flags.metric)
    if not flags.reducer:
        return spec
    if flags.reducer == "time_to_threshold" and metric.threshold is None:
        raise UsageError(f"--reducer time_to_threshold needs a threshold of {metric.name}; add one in --spec")
    read = replace(metric, reducer=flags.reducer)
    return replace(spec, metrics=tuple(read if one is metric else one for one in spec.metrics))
