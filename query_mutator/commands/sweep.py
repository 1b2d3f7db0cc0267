"""`qm sweep`: a command over a grid, in parallel, and what came of it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tyro.conf import Positional

from query_mutator.analysis.reducers import Reducer
from query_mutator.cli.console import note, table
from query_mutator.errors import TooManyFailuresError
from query_mutator.files import disk_errors

if TYPE_CHECKING:
    from query_mutator.analysis.spec import Spec
    from query_mutator.sweep.plan import Setting, Trial, Value
    from query_mutator.sweep.results import Measured, SettingResult
    from query_mutator.sweep.runner import Ended, Runner, SweepFolder
    from query_mutator.sweep.surface import Optimum


@dataclass(frozen=True, kw_only=True)
class SweepFlags:
    """Run a command over settings and seeds, and find where between the extremes the best setting lies.

    Everything behind a bare -- is the command. Each trial gets the flags of its setting and --seed; {name}, {seed} and
    {dir} in the command are replaced instead. A folder that holds an unfinished sweep is gone on with.
    """

    command: Positional[tuple[str, ...]] = ()
    """The command, behind a bare --."""
    grid: tuple[str, ...] = ()
    """NAME=VALUE,VALUE: values of the flag --NAME (_ for -); may be given several times."""
    random: tuple[str, ...] = ()
    """NAME=LOW:HIGH: draws evenly in the logarithm, with --trials."""
    sampler: Literal["random", "optuna"] = "random"
    """How --random draws: blindly, or with Optuna's search (needs the optuna package)."""
    trials: int = 20
    """Settings that --random draws."""
    seeds: int = 3
    """Seeds of each setting."""
    first_seed: int = 1
    """The first of them."""
    seed_step: int = 1000
    """Distance between two seeds. Many trainers give environment i the seed plus i, so that runs whose seeds are
    next to each other share most of their environments and are no independent repeats."""
    jobs: int = 1
    """Trials at a time."""
    timeout_min: float | None = None
    """Minutes after which a trial is ended and counted as failed."""
    dir: str = "sweeps/sweep"
    """Folder of the sweep; the trials write under it."""
    retry_failed: bool = False
    """Run trials again that failed when the sweep was last run."""
    dry_run: bool = False
    """Print the commands and stop."""
    metric: str = "success"
    """Performance metric, as the metric file calls it, or as the command prints it."""
    reducer: Reducer | None = None
    """How a trial's curve of it is read, such as auc; by default as the metric file says."""
    throughput: str | None = None
    """Throughput metric; by default the first that is known."""
    axis: str = "step"
    """Budget that trials are compared at: all are read up to where the shortest got on it."""
    spec: str | None = None
    """Metric file (YAML), as for qm analyze."""
    extend: int = 0
    """Times the grid may be extended at an end at which the best lies."""
    confirm: int = 0
    """Fresh seeds to run the best setting with, so that luck in choosing it is not part of its figure."""
    json: str | None = None
    """File for the results; by default results.json in --dir."""
    picture: str | None = None
    """File for the heat map (.png or .svg); by default heatmap.png in --dir."""

    def __post_init__(self) -> None:
        if not self.command:
            raise ValueError(
                "no command is given; write it behind --, as: qm sweep --grid lr=1e-3,1e-2 -- python train.py"
            )
        if bool(self.grid) == bool(self.random):
            raise ValueError("give either --grid NAME=VALUE,VALUE or --random NAME=LOW:HIGH")
        for name, least in (("trials", 1), ("seeds", 1), ("seed_step", 1), ("jobs", 1), ("extend", 0), ("confirm", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")
        if self.timeout_min is not None and not self.timeout_min > 0:
            raise ValueError(f"timeout_min={self.timeout_min} must be above 0")
        if self.picture is not None and Path(self.picture).suffix not in (".png", ".svg"):
            raise ValueError(f"picture={self.picture} must end in .png or .svg")

    @property
    def trial_seeds(self) -> range:
        """Return the seeds of every setting."""
        return range(self.first_seed, self.first_seed + self.seeds * self.seed_step, self.seed_step)

    @property
    def fresh_seeds(self) -> range:
        """Return as many seeds as --confirm says, none of which chose the best setting."""
        return range(self.trial_seeds.stop, self.trial_seeds.stop + self.confirm * self.seed_step, self.seed_step)


def sweep(flags: SweepFlags) -> None:
    """Run what is missing, then print and write what was found; TooManyFailuresError when trials failed."""
    from query_mutator.analysis.spec import read_spec
    from query_mutator.sweep.plan import grid_settings, parse_grid, parse_ranges, random_settings, trials_of

    spec = read_spec(flags.spec)
    metric = spec.metric(flags.metric)
    if flags.reducer:
        read = replace(metric, reducer=flags.reducer)
        spec = replace(spec, metrics=tuple(read if one is metric else one for one in spec.metrics))
    if flags.throughput:
        spec.metric(flags.throughput)
    grid, ranges = parse_grid(flags.grid), parse_ranges(flags.random)
    settings = grid_settings(grid) if grid else random_settings(ranges, count=flags.trials)
    trials = trials_of(settings, flags.trial_seeds)
    if flags.dry_run:
        _show_plan(flags, trials)
        return
    job = _Sweep(flags, spec)
    if flags.sampler == "optuna" and ranges:
        trials = job.search(ranges)
    job.run(trials)
    while grid and job.extensions < flags.extend and (more := job.extended_grid(grid, trials)):
        grid, job.extensions = more, job.extensions + 1
        trials = trials_of(grid_settings(grid), flags.trial_seeds)
        note(f"the best lies at an end of the grid; extended to {dict(grid)}")
        job.run(trials)
    job.conclude(trials)


class _Sweep:
    """One sweep under way."""

    def __init__(self, flags: SweepFlags, spec: Spec) -> None:
        from query_mutator.sweep.runner import Runner, SweepFolder

        self.flags, self.spec, self.metric = flags, spec, spec.metric(flags.metric)
        self.folder: SweepFolder = SweepFolder(Path(flags.dir), {"command": shlex.join(flags.command)})
        timeout_s = flags.timeout_min * 60 if flags.timeout_min else None
        self.runner: Runner = Runner(self.folder, flags.command, jobs=flags.jobs, timeout_s=timeout_s)
        self.ended: dict[str, Ended] = {}
        self.extensions = 0

    def run(self, trials: Sequence[Trial]) -> None:
        """Run the trials that are missing."""
        self.ended |= self.runner.run(trials, retry_failed=self.flags.retry_failed)

    def measured(self, trials: Sequence[Trial]) -> list[Measured]:
        """Return the numbers of the trials that ended well."""
        from query_mutator.sweep.results import measure

        done = [trial for trial in trials if trial.name in self.ended and self.ended[trial.name].status == "done"]
        flags = self.flags
        return measure(self.folder, done, self.spec, metric=flags.metric, throughput=flags.throughput, axis=flags.axis)

    @property
    def maximise(self) -> bool:
        """Return whether more of the metric is better."""
        return self.metric.direction != "down"

    def extended_grid(self, grid: Mapping[str, tuple[Value, ...]], trials: Sequence[Trial]) -> dict[str, Any]:
        """Return the grid with a value more at each end at which the optimum lies; empty when it lies at none."""
        from query_mutator.sweep.plan import extended
        from query_mutator.sweep.results import optimum_of

        found = optimum_of(self.measured(trials), maximise=self.maximise)
        if isinstance(found, str) or found.kind != "edge":
            return {}
        more = {axis.name: extended(grid[axis.name], axis.end) for axis in found.axes if axis.end}
        added = {name: value for name, value in more.items() if value is not None}
        return (
            {name: (*values, added[name]) if name in added else values for name, values in grid.items()}
            if added
            else {}
        )

    def search(self, ranges: Mapping[str, tuple[float, float]]) -> list[Trial]:
        """Let Optuna choose the settings, a batch of --jobs at a time; return the trials."""
        from query_mutator.sweep.search import optuna_settings

        def evaluate(settings: Sequence[Setting]) -> list[float | None]:
            from query_mutator.sweep.plan import trials_of
            from query_mutator.sweep.results import by_setting

            batch = trials_of(settings, self.flags.trial_seeds)
            self.run(batch)
            means = {result.name: result.mean for result in by_setting(self.measured(batch))}
            return [means.get(", ".join(f"{name}={value}" for name, value in one.items())) for one in settings]

        evaluating: Callable[[Sequence[Setting]], list[float | None]] = evaluate
        return optuna_settings(ranges, evaluating, flags=self.flags, maximise=self.maximise)

    def conclude(self, trials: Sequence[Trial]) -> None:
        """Print the table, the failures and the sentence; write results and picture."""
        from query_mutator.sweep.picture import draw_sweep
        from query_mutator.sweep.results import best_setting, by_setting, optimum_of, sentence, with_front

        measured = self.measured(trials)
        results = with_front(by_setting(measured), maximise=self.maximise)
        failed = [self.ended[t.name] for t in trials if t.name in self.ended and self.ended[t.name].status != "done"]
        _show_failures(failed, self.folder)
        found = optimum_of(measured, maximise=self.maximise)
        best = best_setting(results, found, maximise=self.maximise)
        says = [sentence(self.metric, found, results)]
        if self.flags.confirm:
            says.append(self._confirm(best))
        print(_table(results, self._read(measured), trials))
        print(*says, sep="\n")
        self._write(results, found, measured, failed, says)
        picture = Path(self.flags.picture or self.folder.path / "heatmap.png")
        note(str(draw_sweep(results, found, picture, title=says[0], metric=self._read(measured))))
        if failed:
            raise TooManyFailuresError(f"{len(failed)} of {len(trials)} trials failed; --retry-failed runs them again")

    def _read(self, measured: Sequence[Measured]) -> str:
        """Return what the numbers of the trials are: the metric, and what was read of its curve if there is one."""
        from query_mutator.analysis.wording import reading_name
        from query_mutator.sweep.results import TOLD

        if all(row.source == TOLD for row in measured):
            return self.metric.name
        return f"{self.metric.name}, {reading_name(self.metric, self.metric.reducer)}"

    def _confirm(self, best: SettingResult) -> str:
        """Run the best setting with fresh seeds; return how it did."""
        from query_mutator.analysis.wording import interval, number
        from query_mutator.sweep.plan import trials_of
        from query_mutator.sweep.results import by_setting

        fresh = trials_of([best.setting], self.flags.fresh_seeds)
        self.run(fresh)
        results = by_setting(self.measured(fresh))
        if not results:
            return "Not confirmed: no fresh seed of the best setting has a number."
        again = results[0]
        return (
            f"Confirmed with {len(again.values)} fresh seeds: {best.name} has {self.metric.name} {number(again.mean)} "
            f"{interval(again.interval)} (in the sweep {number(best.mean)})."
        )

    def _write(
        self,
        results: Sequence[SettingResult],
        found: Optimum | str,
        measured: Sequence[Measured],
        failed: Sequence[Ended],
        says: Sequence[str],
    ) -> None:
        from query_mutator.analysis.export import plain

        data = {
            "metric": self.metric.name,
            "sentence": says,
            "optimum": found if isinstance(found, str) else asdict(found),
            "settings": [asdict(result) for result in results],
            "trials": [asdict(row) for row in measured],
            "failed": [asdict(row) for row in failed],
        }
        path = Path(self.flags.json or self.folder.path / "results.json")
        with disk_errors(path):
            path.write_text(json.dumps(plain(data), indent=2) + "\n", encoding="utf-8")
        note(str(path))


def _show_plan(flags: SweepFlags, trials: Sequence[Trial]) -> None:
    from query_mutator.sweep.plan import command_of

    for trial in trials:
        print(shlex.join(command_of(trial, flags.command, Path(flags.dir) / "trials" / trial.name)))
    note(f"{len(trials)} trials, {flags.jobs} at a time")


def _show_failures(failed: Sequence[Ended], folder: SweepFolder) -> None:
    for ended in failed:
        note(f"{ended.name}: {ended.status} (exit code {ended.exit_code}): {ended.says or 'no word on stderr'}")
    if failed:
        note(f"their output is under {folder.path / 'trials'}")


def _table(results: Sequence[SettingResult], read: str, trials: Sequence[Trial]) -> str:
    from query_mutator.analysis.wording import interval, number

    names = list(results[0].setting) if results else []
    rows = [
        (
            *(str(result.setting[name]) for name in names),
            f"{len(result.values)} of {sum(dict(trial.setting) == dict(result.setting) for trial in trials)}",
            f"{number(result.mean)} {interval(result.interval)}".strip(),
            number(result.throughput),
            "yes" if result.on_front else "",
        )
        for result in results
    ]
    header = (*names, "seeds", f"{read} [95 %]", "throughput", "Pareto front")
    return table(f"{len(results)} settings", header, rows)
