"""The flags of `qm sweep`, checked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Le
from cyclopts import Parameter

from query_mutator.bounds import Count, Few, FewOrNone, Positive, Prose, Retries, Seed, Threads
from query_mutator.cli.flags import Positional
from query_mutator.cli.outputs import FIGURE, JsonTo, Output, OutputFlags
from query_mutator.lab.analysis.series import Reducer
from query_mutator.settings.output import Lock

__all__ = ["EngineFlags", "SweepFlags", "is_sweep"]


def is_sweep(path: Path) -> bool:
    """Return whether a folder is that of a sweep, or of an evaluation of several models."""
    return (path / "sweep.json").is_file()


@dataclass(frozen=True, kw_only=True)
class EngineFlags(OutputFlags, Lock):
    """Flags of the commands that run trials: where, how many at a time, with which resources."""

    jobs: Threads | None = None
    """Trials that run at the same time; by default 1, or with --engine ray as many as the cluster's resources allow."""
    engine: Literal["local", "ray"] = "local"
    """Where trials run: local, in processes of this machine; ray, as tasks of a Ray cluster."""
    ray_address: str | None = None
    """Address HOST:PORT of the cluster; by default RAY_ADDRESS, else a cluster that runs here, else a new local one."""
    task_cpus: Annotated[Annotated[float, Ge(0), Le(10000)], Parameter(alias="--trial-cpus")] = 1.0
    """CPUs that --engine ray reserves for a trial."""
    task_gpus: Annotated[Annotated[float, Ge(0), Le(10000)], Parameter(alias="--trial-gpus")] = 0.0
    """GPUs that --engine ray reserves for a trial, which sees no others; 0.5 lets two share one."""
    task_resources: Annotated[tuple[str, ...], Parameter(alias="--trial-resources")] = ()
    """NAME=AMOUNT of the cluster's custom resources that --engine ray reserves for a trial."""
    task_retries: Annotated[Retries, Parameter(alias="--trial-retries")] = 3
    """How often --engine ray restarts a trial whose node or worker was lost; a trial that fails is not restarted."""
    retry_failed: bool = False
    """Rerun trials that failed before."""

    def __post_init__(self) -> None:
        for item in self.task_resources:
            name, equals, amount = item.partition("=")
            if not (name and equals and amount.replace(".", "", 1).isdecimal() and float(amount) > 0):
                raise ValueError(f"--task-resources {item}: write NAME=AMOUNT with an amount above 0, as server=1")

    @property
    def custom_resources(self) -> dict[str, float]:
        """Return the amounts of --task-resources by name."""
        return {name: float(amount) for name, _, amount in (item.partition("=") for item in self.task_resources)}


@dataclass(frozen=True, kw_only=True)
class SweepFlags(EngineFlags):
    """Run a command over settings and seeds, and estimate which setting is best and how certain that is.

    Everything after a bare -- is the command. Each trial gets the flags of its setting and --seed; {name}, {seed} and
    {dir} in the command are replaced instead. Rerun the command to resume an interrupted sweep.
    """

    FIRST: ClassVar[tuple[str, ...]] = (
        "command", "grid", "random", "trials", "seeds", "jobs", "engine", "dir", "retry_failed", "dry_run", "metric",
        "confirm", "json", "picture",
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
    throughput: str | None = None
    """Throughput metric; by default the first that is known."""
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
    picture: Annotated[str | None, Parameter(name=("--figure", "--picture")), FIGURE] = None
    """File for the heat map (.png or .svg); by default heatmap.png in --out."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.command:
            raise ValueError(
                "no command is given; write it after --, as: qm sweep --grid lr=1e-3,1e-2 -- python train.py"
            )
        if bool(self.grid) == bool(self.random):
            raise ValueError("give either --grid NAME=VALUE,VALUE or --random NAME=LOW:HIGH")
        if self.picture is not None and Path(self.picture).suffix not in (".png", ".svg"):
            raise ValueError(f"--figure {self.picture} must end in .png or .svg")

    @property
    def trial_seeds(self) -> range:
        """Return the seeds of every setting."""
        return range(self.first_seed, self.first_seed + self.seeds * self.seed_step, self.seed_step)

    @property
    def fresh_seeds(self) -> range:
        """Return the seeds of --confirm, none of which was used to choose the best setting."""
        return range(self.trial_seeds.stop, self.trial_seeds.stop + self.confirm * self.seed_step, self.seed_step)
