"""Read rows of numbers as series: `metrics.jsonl`, other JSON-lines files, and CSV files of any trainer."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from query_mutator.errors import UsageError
from query_mutator.files import verified
from query_mutator.files.json_lines import read_json_lines
from query_mutator.lab.analysis.series import Series

__all__ = ["TABLES", "flat", "number_or_text", "read_mapping", "read_table"]

#: files of a run folder that hold rows of numbers
TABLES = ("metrics.jsonl", "progress.csv", "progress.json", "metrics.csv", "log.csv")
#: names of the column of environment steps, in order of preference
_STEP_COLUMNS = ("step", "global_step", "_step", "env_steps", "time/total_timesteps", "total_timesteps", "timesteps",
                "Step", "steps")  # fmt: skip
#: names of the column of seconds since the run began
_TIME_COLUMNS = ("wall_s", "time/time_elapsed", "time_elapsed", "_runtime", "relative_time", "Relative Time (Wall)")
_DECIMAL_COMMA = re.compile(r"([+-]?\d+(?:\.\d{3})*),(\d+(?:[eE][+-]?\d+)?)")
#: names of the column of seconds since 1970
_CLOCK_COLUMNS = ("wall_time", "_timestamp", "timestamp", "Wall time")


def read_table(path: Path) -> dict[str, Series]:
    """Return the series of a .jsonl, .json or .csv file by column name.

    `wall` is in seconds since 1970 or since the run began, as the file has it, else the row's number.
    """
    rows = list(_csv_rows(path) if path.suffix == ".csv" else _json_rows(path))
    step_name = _first(_STEP_COLUMNS, rows)
    clock_name = _first(_CLOCK_COLUMNS, rows) or _first(_TIME_COLUMNS, rows)
    columns: dict[str, list[tuple[float, float, float]]] = {}
    for number, row in enumerate(rows):
        step = row.get(step_name, math.nan) if step_name else float(number)
        clock = row.get(clock_name, math.nan) if clock_name else float(number)
        if math.isnan(step):
            continue
        for name, value in row.items():
            if name not in (step_name, clock_name):
                columns.setdefault(name, []).append((step, clock, value))
    arrays = {name: np.array(found, dtype=np.float64).T for name, found in columns.items()}
    return {name: Series(step.astype(np.int64), wall, value) for name, (step, wall, value) in arrays.items()}


def _first(names: Iterable[str], rows: list[dict[str, float]]) -> str | None:
    present = {name for row in rows for name in row}
    return next((name for name in names if name in present), None)


def _json_rows(path: Path) -> Iterator[dict[str, float]]:
    for row in read_json_lines(path):
        yield {name: _as_float(value) for name, value in flat(row, "/") if isinstance(value, (int, float))}


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


def number_or_text(text: str) -> int | float | str:
    """Return the number that a text is, else the text."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def flat(data: Mapping[str, Any], separator: str, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield name and value of each entry; names in nested objects are joined by `separator`."""
    for name, value in data.items():
        if isinstance(value, Mapping) and set(value) == {"value", "desc"}:  # as Weights & Biases writes settings
            yield f"{prefix}{name}", value["value"]
        elif isinstance(value, Mapping):
            yield from flat(value, separator, f"{prefix}{name}{separator}")
        else:
            yield f"{prefix}{name}", value


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


def read_mapping(path: Path) -> dict[str, Any]:
    """Return a JSON or YAML file that holds one object; UsageError when it holds something else."""
    try:
        text = path.read_text(encoding="utf-8")
        data = json.loads(text) if path.suffix == ".json" else _yaml(text)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: cannot be read ({' '.join(str(error).split())})") from None
    data = verified(path, data)
    if not isinstance(data, dict):
        raise UsageError(f"{path}: a {type(data).__name__} where an object with names is expected")
    return data
