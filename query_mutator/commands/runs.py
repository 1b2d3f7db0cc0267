"""`qm runs`: the runs in a folder, the newest last."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from query_mutator.cli.common import JsonFlags, show
from query_mutator.cli.console import table
from query_mutator.runs.listing import ListedRun, list_runs

__all__ = ["RunsFlags", "show_runs"]

_HEADER = ("run", "state", "steps", "valid", "held-out", "calls", "age")
_AGES = ((86_400.0, "d"), (3600.0, "h"), (60.0, "min"))
_SHORTEST_NAME = 12


@dataclass(frozen=True, kw_only=True)
class RunsFlags(JsonFlags):
    """List runs, the newest last: state, steps, success in percent on validation and held-out questions, calls, age.

    A killed run left its lock behind; `--resume` continues it, as it does an interrupted one.
    """

    folder: Positional[str] = "runs"
    """Folder of run folders, or one run folder."""


def show_runs(flags: RunsFlags) -> None:
    """Print the table of runs, or write the list with --json."""
    runs = list_runs(Path(flags.folder))
    data = {"runs": [run.to_json() for run in runs]}
    show(flags, data, _text(runs, flags.folder) if flags.json != "-" else "")


def _text(runs: Sequence[ListedRun], folder: str) -> str:
    if not runs:
        return f"no runs in {folder}"
    now, columns = time.time(), shutil.get_terminal_size().columns
    rows = [_row(run, now) for run in runs]
    others = sum(2 + max(len(row[place]) for row in (_HEADER, *rows)) for place in range(1, len(_HEADER)))
    room = max(_SHORTEST_NAME, columns - others) if sys.stdout.isatty() else None
    count = f"{len(runs)} run{'s' if len(runs) > 1 else ''}"
    return table(f"{count} in {folder}", _HEADER, [(_short(name, room), *rest) for name, *rest in rows])


def _row(run: ListedRun, now: float) -> tuple[str, ...]:
    asked = "" if run.steps_asked is None else f"/{run.steps_asked}"
    return (
        run.name,
        run.state,
        "" if run.steps is None else f"{run.steps}{asked}",
        _percent(run.validation_success),
        _percent(run.held_out_success),
        "" if run.calls is None else f"{run.calls:,}",
        _age(now - run.started),
    )


def _percent(rate: float | None) -> str:
    return "" if rate is None else f"{100 * rate:.1f}"


def _age(seconds: float) -> str:
    for size, unit in _AGES:
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def _short(name: str, room: int | None) -> str:
    """Return a name in `room` columns: its middle is left out, because its ends tell runs apart."""
    if room is None or len(name) <= room:
        return name
    end = (room - 1) // 2
    return f"{name[: room - 1 - end]}…{name[-end:]}"
