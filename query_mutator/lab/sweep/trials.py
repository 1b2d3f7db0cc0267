"""Trials from `--grid` and `--random`: one setting, seed and fold each, with a name and a command line.

--grid train_batch_size=64,128,256     the flag --train-batch-size takes each value
--grid validation_fold=0,1,2,3,4       repeats of each setting and seed: cross-fitting, averaged like seeds
--random lr=1e-4:1e-2                  sampled log-uniformly; integers where both ends are integers
{train_batch_size} {seed} {dir}        in the command are replaced by the value, and then no flag is added
{python}                               is replaced by the Python that runs the trial, on whichever machine
"""

from __future__ import annotations

import hashlib
import itertools
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from query_mutator.errors import UsageError
from query_mutator.lab.analysis.runs import number_or_text

__all__ = [
    "FOLD", "Setting", "Trial", "Value", "command_of", "extended", "grid_settings", "parse_grid", "parse_ranges",
    "random_settings", "trials_of",
]  # fmt: skip

Value = int | float | str
Setting = Mapping[str, Value]

FOLD = "validation_fold"  # a name in the grid that tells repeats apart, as seeds do
LONGEST_NAME = 200  # of a folder: most file systems take 255 bytes
_OUR_TRAINER = "train_query_mutator.py"  # or `qm train`, `python -m query_mutator train`
_OUR_PROGRAMS = {"qm", "query_mutator"}


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run of the command."""

    setting: Setting
    seed: int
    fold: Value | None = None

    @property
    def name(self) -> str:
        """Return a name that is valid as a folder name, with a digest where it does not say all."""
        whole = ",".join(f"{name}={value}" for name, value in {**self.setting, **self.repeat}.items())
        name = re.sub(r"[^\w=.,+-]", "_", whole)
        if name == whole and len(name) <= LONGEST_NAME:
            return name
        return f"{name[:LONGEST_NAME]}-{hashlib.sha256(whole.encode()).hexdigest()[:8]}"

    @property
    def repeat(self) -> Setting:
        """Return what tells the trial from the others of its setting."""
        return {**({} if self.fold is None else {FOLD: self.fold}), "seed": self.seed}


def parse_grid(items: Sequence[str]) -> dict[str, tuple[Value, ...]]:
    """Return the values of each name; UsageError for anything but NAME=VALUE,VALUE."""
    grid = {}
    for item in items:
        name, equals, values = item.partition("=")
        found = tuple(dict.fromkeys(number_or_text(text) for text in values.split(",") if text))
        if not (name and equals and found):
            raise UsageError(f"--grid {item}: write NAME=VALUE,VALUE, as train_batch_size=64,512")
        grid[_plain(name)] = found
    return grid


def parse_ranges(items: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Return low and high of each name; UsageError for anything but NAME=LOW:HIGH above 0."""
    ranges = {}
    for item in items:
        match = re.fullmatch(r"([^=]+)=([^:]+):([^:]+)", item)
        ends = [number_or_text(text) for text in match.groups()[1:]] if match else []
        if match is None or not all(isinstance(end, (int, float)) and end > 0 for end in ends) or ends[0] >= ends[1]:  # type: ignore[operator]
            raise UsageError(f"--random {item}: write NAME=LOW:HIGH with numbers above 0, as lr=1e-4:1e-2")
        ranges[_plain(match[1])] = (ends[0], ends[1])
    return ranges  # type: ignore[return-value]


def grid_settings(grid: Mapping[str, Sequence[Value]]) -> list[Setting]:
    """Return every combination of the values."""
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def random_settings(ranges: Mapping[str, tuple[float, float]], *, count: int) -> list[Setting]:
    """Return log-uniform samples; a larger count only adds to the same ones."""
    rng = np.random.default_rng(0)
    return [{name: _sampled(low, high, rng) for name, (low, high) in ranges.items()} for _ in range(count)]


def _sampled(low: float, high: float, rng: np.random.Generator) -> Value:
    value = math.exp(math.log(low) + float(rng.random()) * (math.log(high) - math.log(low)))
    return round(value) if isinstance(low, int) and isinstance(high, int) else float(f"{value:.4g}")


def extended(values: Sequence[Value], end: str) -> Value | None:
    """Return the value beyond an end of a grid, one step further in log space; None where there is none."""
    numbers = sorted(value for value in values if isinstance(value, (int, float)))
    if len(numbers) < 2:
        return None
    last, before = (numbers[-1], numbers[-2]) if end == "high" else (numbers[0], numbers[1])
    beyond = last * last / before
    whole = all(isinstance(value, int) for value in numbers)
    value: Value = max(1, round(beyond)) if whole else float(f"{beyond:.4g}")
    return None if value in values else value


def trials_of(
    settings: Sequence[Setting], seeds: Iterable[int], *, folds: Sequence[Value | None] = (None,)
) -> list[Trial]:
    """Return all trials, each once, the first seed of every setting before the second of any."""
    trials = [Trial(setting=setting, seed=seed, fold=fold) for seed in seeds for fold in folds for setting in settings]
    return list({trial.name: trial for trial in trials}.values())


def command_of(trial: Trial, command: Sequence[str], folder: Path) -> list[str]:
    """Return the command line of a trial; our own trainer also gets --save-dir."""
    flags: Setting = {**trial.setting, **trial.repeat}
    values: Setting = {**flags, "dir": str(folder), "python": sys.executable}
    words = [re.sub(r"\{(\w+)\}", lambda match: str(values.get(match[1], match[0])), word) for word in command]
    named = {name for word in command for name in re.findall(r"\{(\w+)\}", word)}
    for name, value in flags.items():
        if name not in named:
            words += [f"--{name.replace('_', '-')}", str(value)]
    if "dir" not in named and _is_our_trainer(command):
        words += ["--save-dir", str(folder)]
    return words


def _is_our_trainer(command: Sequence[str]) -> bool:
    names = [Path(word).name for word in command]
    starts = zip(names, names[1:], [*names[2:], ""], strict=False)
    as_command = any(one in _OUR_PROGRAMS and two == "train" and three != "sft" for one, two, three in starts)
    return as_command or _OUR_TRAINER in names


def _plain(name: str) -> str:
    return name.strip().removeprefix("--").replace("-", "_")
