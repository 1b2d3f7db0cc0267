"""One sweep from flags to findings: run the trials, extend the grid or search, estimate the optimum, confirm it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from query_mutator.cli.console import note, table
from query_mutator.errors import UsageError, hide_credentials
from query_mutator.lab.analysis.spec import MetricSpec, Spec, read_spec
from query_mutator.lab.analysis.wording import interval, number, reading_name
from query_mutator.lab.sweep.config import SweepFlags
from query_mutator.lab.sweep.engines import Ended, Engine
from query_mutator.lab.sweep.plan import (
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
from query_mutator.lab.sweep.results import (
    PRINTED,
    Measured,
    SettingResult,
    best_setting,
    by_setting,
    measure,
    optimum_of,
    sentence,
)
from query_mutator.lab.sweep.runner import Runner, SweepFolder
from query_mutator.lab.sweep.search import optuna_settings
from query_mutator.lab.sweep.surface import Optimum

__all__ = ["Findings", "Sweep"]


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

    @property
    def reading(self) -> str:
        """Return what the trials' numbers are: the metric, and the reducer of its curve if there is one."""
        if all(row.source == PRINTED for row in self.measured):
            return self.metric.name
        return f"{self.metric.name}, {reading_name(self.metric, self.metric.reducer)}"

    def table(self) -> str:
        """Return a row for each setting as a plain-text table."""
        names = list(self.results[0].setting)
        rows = [
            (
                *(str(result.setting[name]) for name in names),
                f"{len(result.values)} of {sum(trial.setting == result.setting for trial in self.trials)}",
                f"{number(result.mean)} {interval(result.interval)}".strip(),
                number(result.throughput),
                "yes" if result.on_front else "",
            )
            for result in self.results
        ]
        header = (*names, "runs", f"{self.reading} [95 %]", "throughput", "Pareto front")
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
        self.flags, self.spec = flags, _spec(flags)
        self.metric = self.spec.metric(flags.metric)
        self.grid, self.ranges = parse_grid(flags.grid), parse_ranges(flags.random)
        self.folds: Sequence[Value | None] = self.grid.pop(FOLD, (None,))
        settings = grid_settings(self.grid) if flags.grid else random_settings(self.ranges, count=flags.trials)
        self.trials = trials_of(settings, flags.trial_seeds, folds=self.folds)
        self._ended: dict[str, Ended] = {}

    def commands(self) -> list[str]:
        """Return the command line of every planned trial."""
        folder = Path(self.flags.dir) / "trials"
        return [shlex.join(command_of(trial, self.flags.command, folder / trial.name)) for trial in self.trials]

    def run(self, engine: Engine) -> Findings:
        """Run the missing trials, extending the grid and confirming the best setting as the flags say."""
        flags = self.flags
        self._folder = SweepFolder(Path(flags.dir), command=hide_credentials(shlex.join(flags.command)))
        self._runner = Runner(self._folder, engine, command=flags.command, timeout_min=flags.timeout_min)
        if flags.sampler == "optuna" and self.ranges:
            settings = optuna_settings(
                self.ranges, self._means, flags=flags, batch=engine.slots, maximize=self.metric.more_is_better
            )
            self.trials = trials_of(settings, flags.trial_seeds)
        self._run(self.trials)
        for _ in range(flags.extend if self.grid else 0):
            if not self._extend_grid():
                break
        return self._findings()

    def _run(self, trials: Sequence[Trial]) -> None:
        again = self._without_number() if self.flags.retry_failed else {}
        self._ended |= self._runner.run(trials, retry_failed=self.flags.retry_failed, again=again)

    def _without_number(self) -> dict[str, Ended]:
        """Return as failed the trials that succeeded without a finite number for the metric; none if all lack it."""
        ended = self._folder.ended()
        rows = self._measured([trial for trial in self.trials if trial.name in ended])
        lost = {row.trial.name for row in rows if row.performance is None}
        says = f"its {self.metric.name} is missing, NaN or infinite"
        return {name: replace(ended[name], status="failed", says=says) for name in lost if len(lost) < len(rows)}

    def _measured(self, trials: Sequence[Trial]) -> list[Measured]:
        """Return the numbers of the trials that succeeded."""
        ended = self._folder.ended()
        done = [trial for trial in trials if trial.name in ended and ended[trial.name].status == "done"]
        return measure(self._folder, done, self.spec, self.flags)

    def _results(self, trials: Sequence[Trial]) -> list[SettingResult]:
        return by_setting(self._measured(trials), maximize=self.metric.more_is_better, bounds=self.metric.bounds)

    def _means(self, settings: Sequence[Setting]) -> list[float | None]:
        """Run settings; return the mean of each over its seeds, None where no trial has a number."""
        batch = trials_of(settings, self.flags.trial_seeds)
        self._run(batch)
        results = [result for result in self._results(batch) if not result.diverged]
        means = {tuple(result.setting.items()): result.mean for result in results}
        return [means.get(tuple(setting.items())) for setting in settings]

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

    def _findings(self) -> Findings:
        measured = self._measured(self.trials)
        results = by_setting(measured, maximize=self.metric.more_is_better, bounds=self.metric.bounds)
        optimum = optimum_of(measured, maximize=self.metric.more_is_better)
        ended = [self._ended[trial.name] for trial in self.trials if trial.name in self._ended]
        failed = [*(one for one in ended if one.status != "done"), *self._without_number().values()]
        self._note_failures(failed)
        best = best_setting(results, optimum, maximize=self.metric.more_is_better)
        says = [sentence(self.metric, optimum, best)]
        if self.flags.confirm:
            says.append(self._confirm(best))
        return Findings(
            metric=self.metric,
            trials=self.trials,
            measured=measured,
            failed=failed,
            results=results,
            optimum=optimum,
            says=says,
        )

    def _note_failures(self, failed: Sequence[Ended]) -> None:
        for ended in failed:
            note(f"{ended.name}: {ended.status} (exit code {ended.exit_code}): {ended.says or 'stderr is empty'}")
        if failed:
            note(f"their output is under {self._folder.path / 'trials'}")

    def _confirm(self, best: SettingResult) -> str:
        """Run the best setting with fresh seeds; return how it did."""
        fresh = trials_of([best.setting], self.flags.fresh_seeds, folds=self.folds)
        self._run(fresh)
        results = self._results(fresh)
        if not results:
            return "Not confirmed: no fresh seed of the best setting has a number."
        again = results[0]
        return (
            f"Confirmed with {again.repeats.replace('seed', 'fresh seed')}: {best.name} has {self.metric.name} "
            f"{number(again.mean)} {interval(again.interval)} (in the sweep {number(best.mean)})."
        )


def _spec(flags: SweepFlags) -> Spec:
    """Return the metric file with --reducer applied; UsageError for an unknown metric."""
    spec = read_spec(flags.spec)
    metric = spec.metric(flags.metric)
    if flags.throughput:
        spec.metric(flags.throughput)
    if not flags.reducer:
        return spec
    if flags.reducer == "time_to_threshold" and metric.threshold is None:
        raise UsageError(f"--reducer time_to_threshold needs a threshold of {metric.name}; add one in --spec")
    read = replace(metric, reducer=flags.reducer)
    return replace(spec, metrics=tuple(read if one is metric else one for one in spec.metrics))
