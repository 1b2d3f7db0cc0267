"""A run: its folders, its settings, and every series it logged, over all files and continued folders.

RUN                a path, or a name under --logdir, then under runs/ and tensorboard/
RUN_2, RUN-3 ...   next to it: a continuation when its first step comes after the first step of RUN
t0                 the earliest event of any kind in all files
"""

from __future__ import annotations

import csv
import glob
import json
import logging
import math
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from query_mutator.errors import UsageError
from query_mutator.files import read_json_lines, verified
from query_mutator.lab.analysis.events import EVENTS, EventFile, Series, merged, read_event_file

logger = logging.getLogger(__name__)

__all__ = ["Run", "add_settings", "find_runs", "load_run", "load_runs", "newest_run", "number_or_text", "read_mapping"]

#: files of a run folder that hold rows of numbers
TABLES = ("metrics.jsonl", "progress.csv", "progress.json", "metrics.csv", "log.csv")
_CONFIGS = ("config.json", "config.yaml", "config.yml", "args.json", "hparams.yaml", "params.json")
_CONSTANTS = {"True": True, "False": False, "None": None}
_EPOCH_S = 1e8  # a clock beyond this counts seconds since 1970


@dataclass(kw_only=True)
class Run:
    """One training run: `config` is flat (`flags.lr` is `lr`), `series` is by tag."""

    name: str
    path: Path
    folders: tuple[Path, ...]  # its own, then those of its continuations
    series: Mapping[str, Series]
    config: Mapping[str, Any] = field(default_factory=dict)
    hardware: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def last_step(self) -> int:
        """Return the last step of any series."""
        return max((int(series.step[-1]) for series in self.series.values()), default=0)

    @cached_property
    def duration_s(self) -> float:
        """Return the seconds from t0 to the last point."""
        return max((float(series.wall.max()) for series in self.series.values()), default=0.0)


def find_runs(names: Sequence[str], *, logdir: str | None = None) -> list[Path]:
    """Return the folders or files that `names` match, `*` allowed; UsageError for a name without a match."""
    places = [Path(), *([Path(logdir)] if logdir else []), Path("runs"), Path("tensorboard")]
    found: dict[Path, Path] = {}  # resolved -> as named; `latest` is a link to another run
    for name in names:
        paths = next(filter(None, (_matches(place, name) for place in places)), [])
        if not paths:
            tried = ", ".join(str(place) for place in places)
            raise UsageError(
                f"run {name!r} does not exist (searched in {tried}); give a path, or the folder of runs with --logdir"
            )
        for path in paths:
            found.setdefault(path.resolve(), path)
    return list(found.values())


def load_runs(paths: Sequence[Path], *, merge_suffixed: bool = True) -> list[Run]:
    """Load the runs; a folder that is named itself is not a continuation of another."""
    named = {path.resolve() for path in paths}
    return [load_run(path, merge_suffixed=merge_suffixed, not_these=named) for path in paths]


def load_run(path: Path, *, merge_suffixed: bool = True, not_these: Set[Path] = frozenset()) -> Run:
    """Load the run in a folder or a single file; UsageError when nothing was logged there."""
    event_files = [read_event_file(file) for file in _event_files(path)]
    folders = [path]
    for folder in _suffixed(path) if merge_suffixed else ():
        more = [read_event_file(file) for file in _event_files(folder)] if folder.resolve() not in not_these else []
        if _continues(event_files, more):
            event_files += more
            folders.append(folder)
    tables = [file for folder in folders for file in _table_files(folder)]
    t0 = min((file.first_wall for file in event_files), default=0.0)
    tags = dict.fromkeys(tag for file in event_files for tag in file.scalars)
    series = _from_tables(tables, t0) | {tag: merged(event_files, tag).since(t0) for tag in tags}
    if not series:
        raise UsageError(_nothing_in(path))
    config, hardware = _config(folders[0], event_files)
    return Run(
        name=path.resolve().name if path.is_dir() else path.stem,
        path=path,
        folders=tuple(folders),
        series=series,
        config=config,
        hardware=hardware,
    )


def add_settings(runs: Sequence[Run], items: Sequence[str]) -> None:
    """Add settings that runs did not record, written RUN:NAME=VALUE with `*` allowed in RUN; they override."""
    for item in items:
        run_name, colon, rest = item.partition(":")
        name, equals, value = rest.partition("=")
        matching = [run for run in runs if fnmatch(run.name, run_name)]
        if not (colon and equals and matching):
            names = ", ".join(run.name for run in runs)
            raise UsageError(f"--set {item}: write RUN:NAME=VALUE, with a run of these: {names}")
        for run in matching:
            run.config = {**run.config, name: value}


def newest_run(folder: Path) -> Path | None:
    """Return the run folder under `folder` that was written last, None where there is none."""
    files = [file for pattern in (EVENTS, *TABLES) for file in folder.rglob(pattern)]
    if not files:
        return None
    newest = max(files, key=lambda file: file.stat().st_mtime).parent
    return newest.parent if newest.name == "tensorboard" else newest


# --- where -----------------------------------------------------------------------------------------------------------


def _matches(place: Path, name: str) -> list[Path]:
    if glob.has_magic(name):
        found = (Path(match) for match in sorted(glob.glob(str(place / name)), key=_natural))
        return [path for path in found if not path.is_symlink() and (_event_files(path) or _table_files(path))]
    return [place / name] if (place / name).exists() else []


def _natural(text: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text)]


def _nothing_in(path: Path) -> str:
    inside = sorted({file.parent.name for file in path.rglob(EVENTS)})[:4] if path.is_dir() else []
    if inside:
        return f"{path}: a folder of runs, not a run; name the runs, or write '{path}/*' (it holds {', '.join(inside)})"
    return f"{path}: no numbers found; a run has TensorBoard event files, {TABLES[0]} or {TABLES[1]}"


def _event_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path] if "tfevents" in path.name else []
    return sorted([*path.glob(EVENTS), *(path / "tensorboard").glob(EVENTS)])


def _table_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path] if path.suffix in (".jsonl", ".json", ".csv") else []
    files = [path / name for name in TABLES]
    return [file for file in files if file.exists() and file.stat().st_size]  # that of a plan run is empty


def _suffixed(path: Path) -> list[Path]:
    """Return the folders with this one's name and a number suffix, in the order of the numbers."""
    if not path.is_dir():
        return []
    name = re.compile(re.escape(path.resolve().name) + r"[_-](\d+)")
    siblings = [
        (int(match[1]), other) for other in path.resolve().parent.iterdir() if (match := name.fullmatch(other.name))
    ]
    return [other for _, other in sorted(siblings) if _event_files(other)]


def _continues(before: Sequence[EventFile], after: Sequence[EventFile]) -> bool:
    """Return whether the later files continue the earlier ones, rather than start from the first step again."""
    if not before or not any(file.scalars for file in after):
        return False
    later = min(file.first_wall for file in after) >= min(file.first_wall for file in before)
    return later and _first_step(after) > _first_step(before)


def _first_step(files: Sequence[EventFile]) -> int:
    return min((int(points.step.min()) for file in files for points in file.scalars.values()), default=0)


# --- settings ---------------------------------------------------------------------------------------------------------


def _config(folder: Path, files: Sequence[EventFile]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return settings and hardware from a config file in the folder, else as logged: hyperparameters, or a table."""
    path = next((folder / name for name in _CONFIGS if (folder / name).exists()), None)
    if path is not None:
        try:
            data = read_mapping(path)
        except UsageError as error:
            if path.suffix == ".json":
                raise
            logger.warning("%s; the run is read without its settings", error)
            data = {}
        hardware = data.get("hardware")
        flags = data["flags"] if isinstance(data.get("flags"), Mapping) else data
        return dict(_flat(flags, ".")), dict(hardware) if isinstance(hardware, Mapping) else {}
    logged = {name: value for file in files for name, value in file.hparams.items()}
    texts = (text for file in files for tag, text in file.texts.items() if "hyperparameters" in tag or "config" in tag)
    return dict(row for text in texts for row in _rows_of_table(text)) | logged, {}


def _rows_of_table(text: str) -> Iterator[tuple[str, Any]]:
    """Yield name and value of each row of a Markdown table, as CleanRL logs its hyperparameters."""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) == 2 and not set(cells[1]) <= set("-: ") and cells != ["param", "value"]:
            yield cells[0], _CONSTANTS.get(cells[1], number_or_text(cells[1]))


def _flat(data: Mapping[str, Any], separator: str, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield name and value of each entry; names in nested objects are joined by `separator`."""
    for name, value in data.items():
        if isinstance(value, Mapping) and set(value) == {"value", "desc"}:  # as Weights & Biases writes settings
            yield f"{prefix}{name}", value["value"]
        elif isinstance(value, Mapping):
            yield from _flat(value, separator, f"{prefix}{name}{separator}")
        else:
            yield f"{prefix}{name}", value


def number_or_text(text: str) -> int | float | str:
    """Return the number that a text is, else the text."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def read_mapping(path: Path) -> dict[str, Any]:
    """Return a JSON, TOML or YAML file that holds one object; UsageError when it holds something else."""
    try:
        text = path.read_text(encoding="utf-8")
        data = {".json": json.loads, ".toml": tomllib.loads}.get(path.suffix, _yaml)(text)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: cannot be read ({' '.join(str(error).split())})") from None
    data = verified(path, data)
    if not isinstance(data, dict):
        raise UsageError(f"{path}: a {type(data).__name__} where an object with names is expected")
    return data


def _yaml(text: str) -> Any:
    """Return YAML as plain data: tags such as `!!python/tuple` are left out, and run no code."""
    import yaml  # not in a plain install

    class Loader(yaml.SafeLoader):
        pass

    def plain(loader: yaml.SafeLoader, suffix: str, node: yaml.Node) -> Any:
        if isinstance(node, yaml.MappingNode):
            return loader.construct_mapping(node, deep=True)
        return loader.construct_sequence(node, deep=True) if isinstance(node, yaml.SequenceNode) else node.value

    Loader.add_multi_constructor("", plain)
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None


# --- rows of numbers: metrics.jsonl, other JSON-lines files, CSV files of any trainer ---------------------------------

#: names of the column of environment steps, in order of preference
_STEP_COLUMNS = ("step", "global_step", "_step", "env_steps", "time/total_timesteps", "total_timesteps", "timesteps",
                "Step", "steps")  # fmt: skip
#: names of the column of seconds since 1970, then since the run began
_TIME_COLUMNS = ("wall_time", "_timestamp", "timestamp", "Wall time", "wall_s", "time/time_elapsed", "time_elapsed",
                 "_runtime", "relative_time", "Relative Time (Wall)")  # fmt: skip
_DECIMAL_COMMA = re.compile(r"([+-]?\d+(?:\.\d{3})*),(\d+(?:[eE][+-]?\d+)?)")


def _from_tables(files: Sequence[Path], t0: float) -> dict[str, Series]:
    """Return the series of all files; the first file that has a tag counts."""
    found: dict[str, Series] = {}
    for path in files:
        for tag, series in _read_table(path).items():
            begins = float(np.nanmin(series.wall))
            relative = series.since(t0 or begins) if begins > _EPOCH_S else series
            found.setdefault(tag, relative.by_step())
    return found


def _read_table(path: Path) -> dict[str, Series]:
    """Return the series of a .jsonl, .json or .csv file by column name.

    `wall` is in seconds since 1970 or since the run began, as the file has it, else the row's number.
    """
    rows = list(_csv_rows(path) if path.suffix == ".csv" else _json_rows(path))
    step_name, clock_name = _first(_STEP_COLUMNS, rows), _first(_TIME_COLUMNS, rows)
    columns: dict[str, list[tuple[float, float, float]]] = {}
    for number, row in enumerate(rows):
        step = row.get(step_name, math.nan) if step_name else float(number)
        clock = row.get(clock_name, math.nan) if clock_name else float(number)
        for name, value in row.items() if not math.isnan(step) else ():
            if name not in (step_name, clock_name):
                columns.setdefault(name, []).append((step, clock, value))
    arrays = {name: np.array(found, dtype=np.float64).T for name, found in columns.items()}
    return {name: Series(step.astype(np.int64), wall, value) for name, (step, wall, value) in arrays.items()}


def _first(names: Iterable[str], rows: list[dict[str, float]]) -> str | None:
    present = {name for row in rows for name in row}
    return next((name for name in names if name in present), None)


def _json_rows(path: Path) -> Iterator[dict[str, float]]:
    for row in read_json_lines(path):
        yield {name: _as_float(value) for name, value in _flat(row, "/") if isinstance(value, (int, float))}


def _csv_rows(path: Path) -> Iterator[dict[str, float]]:
    """Yield the numbers of each row; a file whose columns `;` or tabs separate may have decimal commas."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            header = file.readline()
            file.seek(0)
            delimiter = max(",;\t", key=header.count)
            for row in csv.DictReader(file, delimiter=delimiter):
                texts = {name: str(text) for name, text in row.items()}
                if delimiter != ",":
                    texts = {name: _with_point(text) for name, text in texts.items()}
                values = {name: number_or_text(text) for name, text in texts.items()}
                yield {name: _as_float(value) for name, value in values.items() if not isinstance(value, str)}
    except (UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{path}: not a CSV file ({error})") from None


def _with_point(text: str) -> str:
    """Return a number with a decimal comma as one with a point, where dots group its thousands without them."""
    found = _DECIMAL_COMMA.fullmatch(text.strip())
    return text if found is None else f"{found[1].replace('.', '')}.{found[2]}"


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer beyond every float
        return math.inf
