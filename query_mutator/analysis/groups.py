"""Runs that differ in their seed alone belong together: finding the groups, what differs between them, and what else.

--group-by FIELD[,FIELD]      equal settings
--group-by 'ppo-*,iqn-*'      the first pattern that matches the name
--group-by '{group}-s{seed}'  the part of the name where {group} stands
nothing                       all settings but seed, names and places; without settings, the name without its seed
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from query_mutator.analysis.curves import AXES, counter_of, curves_of, reduced, setting
from query_mutator.analysis.runs import Run
from query_mutator.analysis.spec import Confounder, Spec
from query_mutator.errors import UsageError
from query_mutator.registry import nearest

#: settings that name a run or a place rather than change what is learned
NOT_SETTINGS = {
    *("name", "run_name", "exp_name", "save_dir", "resume", "config", "dry_run", "track", "wandb_project_name"),
    *("wandb_entity", "capture_video", "logdir", "log_dir", "output_dir", "ollama_url", "device"),
}
MOVED = 0.10  # two groups' figures that differ by more than that share have moved
_SEED_IN_NAME = re.compile(r"[-_.]+(?:seed|s)[-_]?(\d+)(?:_\d+)?$", re.IGNORECASE)  # Stable-Baselines3 adds its _1
_STAMP_IN_NAME = re.compile(r"^\d{8}-\d{6}-|-\d+$|__\d{9,}$")


@dataclass(frozen=True, kw_only=True)
class Group:
    """Runs of one setting."""

    name: str
    runs: tuple[Run, ...]
    seeds: tuple[object, ...]  # of each run; None where it is not told

    @cached_property
    def num_seeds(self) -> int:
        """Return how many different seeds there are; runs whose seed is not told count one each."""
        told = [seed for seed in self.seeds if seed is not None]
        return len(set(map(str, told))) + len(self.seeds) - len(told)


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldDiff:
    """A setting that is not the same in all groups."""

    field: str
    values: tuple[str, ...]  # one a group


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """A derived figure by group, and whether it moved."""

    name: str
    values: tuple[float | None, ...]
    moved: bool


def group_runs(runs: Sequence[Run], spec: Spec, *, by: str | None = None) -> list[Group]:
    """Return the runs in groups, in the order in which they first appear."""
    key = _key(runs, spec, by)
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(key(run), []).append(run)
    if by is None and len(found) == len(runs):
        found = {run.name: [run] for run in runs} if len({run.name for run in runs}) == len(runs) else found
    return [
        Group(name=name, runs=tuple(members), seeds=tuple(_seed(run, spec) for run in members))
        for name, members in found.items()
    ]


def config_diff(groups: Sequence[Group], spec: Spec) -> list[FieldDiff]:
    """Return the settings that differ between groups, seeds and names left out."""
    ignored = NOT_SETTINGS | set(spec.field_names("seed"))
    names = dict.fromkeys(name for group in groups for run in group.runs for name in run.config)
    rows = []
    for name in names:
        values = tuple(_common(group, name) for group in groups)
        if name not in ignored and len(set(values)) > 1:
            rows.append(FieldDiff(field=name, values=values))
    return rows


def confounder_report(groups: Sequence[Group], spec: Spec) -> list[Moved]:
    """Return the derived figures that runs tell enough about, those that moved first."""
    rows = []
    for confounder in spec.confounders:
        values = tuple(_mean([_derived(run, confounder, spec) for run in group.runs]) for group in groups)
        known = [value for value in values if value is not None]
        if known:
            moved = max(known) - min(known) > MOVED * max(map(abs, known))
            rows.append(Moved(name=confounder.name, values=values, moved=moved))
    return sorted(rows, key=lambda row: not row.moved)


# --- names and keys ---------------------------------------------------------------------------------------------------


def _key(runs: Sequence[Run], spec: Spec, by: str | None) -> Callable[[Run], str]:
    if by is None:
        return _default_key(runs, spec)
    if "{group}" in by:
        return _pattern_key(by)
    if any(sign in by for sign in "*?["):
        return _glob_key(by)
    return _field_key(runs, spec, by.split(","))


def _default_key(runs: Sequence[Run], spec: Spec) -> Callable[[Run], str]:
    if not all(run.config for run in runs):
        return lambda run: _SEED_IN_NAME.sub("", run.name)
    ignored = NOT_SETTINGS | set(spec.field_names("seed"))
    configs = [{name: str(value) for name, value in run.config.items() if name not in ignored} for run in runs]
    names = dict.fromkeys(name for config in configs for name in config)
    differing = [name for name in names if len({config.get(name) for config in configs}) > 1]
    if not differing and len(runs) > 1 and not any(_seed(run, spec) is not None for run in runs):
        return lambda run: _SEED_IN_NAME.sub("", run.name)
    return lambda run: ", ".join(f"{name}={run.config.get(name)}" for name in differing) or _plain_name(run)


def _plain_name(run: Run) -> str:
    return _STAMP_IN_NAME.sub("", _SEED_IN_NAME.sub("", run.name)) or run.name


def _pattern_key(by: str) -> Callable[[Run], str]:
    parts = re.split(r"(\{\w+\})", by)
    pattern = "".join(f"(?P<{part[1:-1]}>.+?)" if part.startswith("{") else re.escape(part) for part in parts)

    def key(run: Run) -> str:
        match = re.fullmatch(pattern, run.name)
        if match is None:
            raise UsageError(f"run {run.name!r} does not match --group-by {by!r}")
        return match["group"]

    return key


def _glob_key(by: str) -> Callable[[Run], str]:
    patterns = by.split(",")

    def key(run: Run) -> str:
        match = next((pattern for pattern in patterns if fnmatch.fnmatch(run.name, pattern)), None)
        if match is None:
            raise UsageError(f"run {run.name!r} matches no pattern of --group-by {by!r}")
        return match

    return key


def _field_key(runs: Sequence[Run], spec: Spec, names: Sequence[str]) -> Callable[[Run], str]:
    for name in names:
        if all(setting(run, spec, name) is None for run in runs):
            known = sorted({field for run in runs for field in run.config})
            near = nearest(name, known)
            hint = f"did you mean {near!r}?" if near else f"known: {', '.join(known[:12]) or 'none'}"
            raise UsageError(f"--group-by {name}: no run has such a setting; {hint}")
    return lambda run: ", ".join(f"{name}={setting(run, spec, name)}" for name in names)


def _seed(run: Run, spec: Spec) -> object | None:
    told = setting(run, spec, "seed")
    if told is not None:
        return told
    match = _SEED_IN_NAME.search(run.name)
    return int(match[1]) if match else None


def _common(group: Group, name: str) -> str:
    values = dict.fromkeys(str(run.config.get(name, "not set")) for run in group.runs)
    return " | ".join(values)


# --- derived figures --------------------------------------------------------------------------------------------------


def _derived(run: Run, confounder: Confounder, spec: Spec) -> float | None:
    if confounder.metric:
        curves = curves_of(run, spec.metric(confounder.metric), spec).values()
        return _mean([reduced(curve, spec.metric(confounder.metric)).value for curve in curves])
    if confounder.over:
        counted = _ratio(_growth(run, confounder.over, spec), _growth(run, confounder.under, spec))
        if counted is not None or not confounder.field:
            return counted
    value = _number(setting(run, spec, confounder.field))
    return _ratio(value, _number(setting(run, spec, confounder.per_field))) if confounder.per_field else value


def _growth(run: Run, axis: str, spec: Spec) -> float | None:
    """Return how far a counter counted; samples learned are updates times batch where only these are told."""
    if axis in AXES:
        counter = counter_of(run, spec, "env_steps") if "env_steps" in spec.axes else None
        return float(counter.value[-1]) if counter is not None else float(run.last_step)
    counter = counter_of(run, spec, axis)
    if counter is not None:
        return float(counter.value[-1])
    if axis == "samples" and "updates" in spec.axes:
        updates, batch = _growth(run, "updates", spec), _number(setting(run, spec, "batch"))
        return updates * batch if updates is not None and batch is not None else None
    return None


def _ratio(over: float | None, under: float | None) -> float | None:
    return over / under if over is not None and under else None


def _number(value: object | None) -> float | None:
    try:
        return float(str(value))
    except ValueError:
        return None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None and np.isfinite(value)]
    return float(np.mean(known)) if known else None
