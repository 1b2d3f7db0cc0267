"""The run folder, and plugins to load first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter

from query_mutator.bounds import Count, Group, Matches


@dataclass(frozen=True, kw_only=True)
class Plugins(Group):
    """Your own code."""

    plugin: tuple[str, ...] = ()
    """Modules or .py files to load first, which register operators, forms, reward parts, backends or learners."""


@dataclass(frozen=True, kw_only=True)
class RunFolder(Plugins):
    """The run folder."""

    save_dir: Annotated[str, Parameter(alias="--out")] = "runs"
    """Folder of the run folders."""


@dataclass(frozen=True, kw_only=True)
class NamedRun(RunFolder):
    """The run folder and its name, or only an estimate."""

    name: Annotated[str, Matches(r"[^/.][^/]*", "cannot be in a folder's name; try letters, digits and -")] | None = (
        None
    )
    """Last part of the run folder's name; by default the learner's name."""
    dry_run: bool = False
    """Print an estimate (questions, steps, model calls, time) and stop."""


@dataclass(frozen=True, kw_only=True)
class Run(NamedRun):
    """The run: its folder, its log, its checkpoints."""

    resume: str | None = None
    """Continue in a run folder, repeating only calls that were in flight."""
    save_interval: Count = 5
    """Updates between two checkpoints."""
    log_interval: Count = 1
    """Updates between two rows of metrics."""
    config: str | None = None
    """JSON or TOML file of flags; the command line takes precedence."""
