"""Groups of runs of one setting, the settings that differ between groups, and what else moved.

--group-by FIELD[,FIELD]      equal settings
--group-by 'ppo-*,iqn-*'      the first pattern that matches the name
--group-by '{group}-s{seed}'  the part of the name at {group}
no --group-by                 all settings but seed, validation fold, names and paths; without settings, the name
                              without its seed
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from query_mutator.errors import UsageError
from query_mutator.lab.analysis.curves import counter_of, curves_of, reduced, setting
from query_mutator.lab.analysis.runs import Run
from query_mutator.lab.analysis.spec import Spec, worked_out
from query_mutator.registry import nearest

__all__ = ["Group", "Moved", "config_diff", "confounder_report", "group_runs"]

#: settings that name a run or a path, and do not change what is learned
_NOT_SETTINGS = {
    *("name", "run_name", "exp_name", "save_dir", "resume", "config", "dry_run", "track", "wandb_project_name"),
    *("wandb_entity", "capture_video", "logdir", "log_dir", "output_dir", "ollama_url", "device"),
}
_MOVED = 0.10  # figures of two groups that differ by more than this share have moved
_SEED_IN_NAME = re.compile(r"[-_.]+(?:seed|s)[-_]?(\d+)(?:_\d+)?$", re.IGNORECASE)  # Stable-Baselines3 adds its _1
_SPEED = re.compile(r"(^|/)(time|perf|system)/|_per_s|fps|sps|seconds|elapsed|wall|_s$", re.IGNORECASE)
_STAMP_IN_NAME = re.compile(r"^\d{8}-\d{6}-|-\d+$|__\d{9,}$")


@dataclass(frozen=True, kw_only=True)
class Group:
    """Runs of one setting."""

    name: str
    runs: tuple[Run, ...]
    seeds: tuple[object, ...]  # of each run; None where it is unknown

    @cached_property
    def repeats(self) -> tuple[int, ...]:
        """Return, for each run, the first run that it repeats, or itself.

        Runs of one seed are repeats, and so are copies: runs that logged the same numbers.
        """
        first: dict[object, int] = {}
        found: list[int] = []
        for place, (run, seed) in enumerate(zip(self.runs, self.seeds, strict=True)):
            keys = [("numbers", _digest(run)), *([("seed", str(seed))] if seed is not None else [])]
            known = [first[key] for key in keys if key in first]
            found.append(min(known, default=place))
            first |= {key: found[-1] for key in keys if key not in first}
        return tuple(found)

    @property
    def num_seeds(self) -> int:
        """Return the number of different seeds; runs without a known seed count one each, copies of a run do not."""
        return len(set(self.repeats))


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """A derived figure of each group, and whether it moved."""

    name: str
    values: tuple[float | None, ...]
    moved: bool


def group_runs(runs: Sequence[Run], spec: Spec, *, by: str | None = None) -> list[Group]:
    """Return the groups of runs, in the order of their first runs."""
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


def config_diff(groups: Sequence[Group], spec: Spec) -> dict[str, tuple[str, ...]]:
    """Return the settings that differ between groups, one value for each, without seeds and names."""
    ignored = _NOT_SETTINGS | set(spec.field_names("seed"))
    names = dict.fromkeys(name for group in groups for run in group.runs for name in run.config if name not in ignored)
    rows = {name: tuple(_common(group, name) for group in groups) for name in names}
    return {name: values for name, values in rows.items() if len(set(values)) > 1}


def confounder_report(groups: Sequence[Group], spec: Spec) -> list[Moved]:
    """Return the derived figures that the runs allow, those that moved first."""
    rows = []
    for name, formulas in spec.confounders.items():
        values = tuple(_mean([_derived(run, formulas, spec) for run in group.runs]) for group in groups)
        known = [value for value in values if value is not None]
        if known:
            moved = max(known) - min(known) > _MOVED * max(map(abs, known))
            rows.append(Moved(name=name, values=values, moved=moved))
    return sorted(rows, key=lambda row: not row.moved)


# --- names and keys ---------------------------------------------------------------------------------------------------


def _key(runs: Sequence[Run], spec: Spec, by: str | None) -> Callable[[Run], str]:
    if by is None:
        return _default_key(runs, spec)
    if "{group}" in by or any(sign in by for sign in "*?["):
        return _name_key(by)
    return _field_key(runs, spec, by.split(","))


def _default_key(runs: Sequence[Run], spec: Spec) -> Callable[[Run], str]:
    if not all(run.config for run in runs):
        return lambda run: _SEED_IN_NAME.sub("", run.name)
    ignored = _NOT_SETTINGS | set(spec.field_names("seed"))
    folds = set(spec.field_names("fold"))

    def settings(run: Run) -> dict[str, str]:
        kept = {name: str(value) for name, value in run.config.items() if name not in ignored}
        return {name: "any" if name in folds and value.isdigit() else value for name, value in kept.items()}

    configs = [settings(run) for run in runs]
    names = dict.fromkeys(name for config in configs for name in config)
    differing = [name for name in names if len({config.get(name) for config in configs}) > 1]
    if not differing and len(runs) > 1 and not any(_seed(run, spec) is not None for run in runs):
        return lambda run: _SEED_IN_NAME.sub("", run.name)
    return lambda run: ", ".join(f"{name}={settings(run).get(name)}" for name in differing) or _plain_name(run)


def _plain_name(run: Run) -> str:
    return _STAMP_IN_NAME.sub("", _SEED_IN_NAME.sub("", run.name)) or run.name


def _name_key(by: str) -> Callable[[Run], str]:
    """Return the key of a run's name: the part at {group}, or the first pattern that matches."""
    has_group = "{group}" in by
    if has_group:
        parts = re.split(r"(\{[a-zA-Z_]\w*\})", by)
        if len(named := [part for part in parts if part[:1] == "{"]) != len({*named}):
            raise UsageError(f"--group-by {by!r} has a name twice; write each once, as {{group}}-s{{seed}}")
        patterns = {by: "".join(f"(?P<{part[1:-1]}>.+?)" if part[:1] == "{" else re.escape(part) for part in parts)}
    else:
        patterns = {pattern: fnmatch.translate(pattern) for pattern in by.split(",")}

    def key(run: Run) -> str:
        for pattern, regex in patterns.items():
            if match := re.fullmatch(regex, run.name):
                return match["group"] if has_group else pattern
        raise UsageError(f"run {run.name!r} does not match --group-by {by!r}; add a pattern that does")

    return key


def _field_key(runs: Sequence[Run], spec: Spec, names: Sequence[str]) -> Callable[[Run], str]:
    for name in names:
        if all(setting(run, spec, name) is None for run in runs):
            known = sorted({field for run in runs for field in run.config})
            near = nearest(name, known)
            hint = f"did you mean {near!r}?" if near else f"known: {', '.join(known[:12]) or 'none'}"
            raise UsageError(f"--group-by {name}: no run has this setting; {hint}")
    return lambda run: ", ".join(f"{name}={setting(run, spec, name)}" for name in names)


def _seed(run: Run, spec: Spec) -> object | None:
    """Return what tells a run from the others of its group: its seed, and its validation fold if it has one."""
    recorded, fold = setting(run, spec, "seed"), setting(run, spec, "fold")
    if recorded is not None:
        return f"{recorded}, fold {fold}" if str(fold).isdigit() else recorded
    match = _SEED_IN_NAME.search(run.name)
    return int(match[1]) if match else None


def _digest(run: Run) -> int:
    """Return a hash of the numbers that a run logged, to six digits.

    Speeds, which differ between two runs of one seed, are left out, unless fewer than five different numbers remain:
    two seeds may well share those.
    """
    columns = {tag: np.char.mod("%.5e", series.value) for tag, series in sorted(run.series.items())}
    kept = {tag: column for tag, column in columns.items() if not _SPEED.search(tag)}
    if len({text for column in kept.values() for text in column.tolist()}) < 5:
        kept = columns
    return hash(tuple((tag, run.series[tag].step.tobytes(), column.tobytes()) for tag, column in kept.items()))


def _common(group: Group, name: str) -> str:
    values = dict.fromkeys(str(run.config.get(name, "not set")) for run in group.runs)
    return " | ".join(values)


# --- derived figures --------------------------------------------------------------------------------------------------


def _derived(run: Run, formulas: Sequence[str], spec: Spec) -> float | None:
    found = (worked_out(formula, lambda name: _quantity(run, name, spec)) for formula in formulas)
    return next((value for value in found if value is not None), None)


def _quantity(run: Run, name: str, spec: Spec) -> object | None:
    """Return the last value of a counter, the mean of a metric, or a setting."""
    if name == "step":
        return _quantity(run, "env_steps", spec) or run.last_step
    if name in spec.axes:
        counter = counter_of(run, spec, name)
        return None if counter is None else counter.value[-1]
    if name in {metric.name for metric in spec.metrics}:
        metric = spec.metric(name)
        return _mean([reduced(curve, metric).value for curve in curves_of(run, metric, spec).values()])
    return setting(run, spec, name)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None and np.isfinite(value)]
    return float(np.mean(known)) if known else None
