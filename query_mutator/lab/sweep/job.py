"""One sweep: run the trials, extend the grid or let Optuna search, estimate the optimum, confirm it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from cyclopts import Parameter

from query_mutator.bounds import Count, Few, FewOrNone, Positive, Prose, Seed
from query_mutator.cli.console import note, table
from query_mutator.cli.flags import Positional
from query_mutator.cli.outputs import JsonTo, Output
from query_mutator.errors import UsageError, hide_credentials
from query_mutator.lab.analysis.events import Reducer
from query_mutator.lab.analysis.report import interval, number
from query_mutator.lab.analysis.spec import MetricSpec, Spec, read_spec
from query_mutator.lab.sweep.results import (
    Measured,
    SettingResult,
    best_setting,
    by_setting,
    measure,
    optimum_of,
    sentence,
)
from query_mutator.lab.sweep.running import Ended, Engine, EngineFlags, SweepFolder, is_sweep, run_trials
from query_mutator.lab.sweep.surface import Optimum
from query_mutator.lab.sweep.trials import (
    FOLD,
    Setting,
    Trial,
    Value,
    command_of,
    extended,
    grid_settings,
    parse_grid,
    parse_ranges,
    random_settings,
    trials_of,
)

__all__ = ["Findings", "Sweep", "SweepFlags"]


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
    """What a sweep found; `says` are its sentences, `optimum` is a text where there is no response surface."""

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
        more = {axis.name: extended(self.grid[axis.name], axis.end) for axis in found.axes if axis.end}
        added: Mapping[str, Value] = {name: value for name, value in more.items() if value is not None}
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
