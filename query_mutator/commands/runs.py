"""`qm runs` and `qm compare`: the runs in a folder, the newest last, and runs compared question by question.

qm compare runs/a runs/b                              the policies of two runs
qm compare runs/a runs/a --method best_plan policy    two methods of one run

`qm report`, `qm show` and `qm watch`: the pages of runs, written to a file, opened or kept open in a browser.
"""

from __future__ import annotations

import os
import time
import webbrowser
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

from cyclopts import Parameter

from query_mutator.bounds import Port
from query_mutator.cli.console import note, table
from query_mutator.cli.flags import Positional
from query_mutator.cli.outputs import JsonFlags, Output, OutputFlags, holding, show
from query_mutator.errors import UsageError
from query_mutator.files.run_dir import list_runs, run_state
from query_mutator.report.build import MARK, REPORT_FILE, serve_pages, write_page
from query_mutator.report.table import compare_entries, paired_text, read_entry

_HEADER = ("run", "state", "steps", "valid", "held-out", "calls", "age")
_AGES = ((86_400.0, "d"), (3600.0, "h"), (60.0, "min"))
MOST_RUNS = 26  # letters


@dataclass(frozen=True, kw_only=True)
class RunsFlags(JsonFlags):
    """List runs, the newest last: state, steps, success in percent on validation and held-out questions, calls, age.

    The state `killed` means that the run left its lock behind; `--resume` continues it.
    """

    folder: Positional[str] = "runs"
    """Folder of run folders, or one run folder."""


def show_runs(flags: RunsFlags) -> None:
    """Print the table of runs, or write the list with --json."""
    runs = list_runs(Path(flags.folder))
    started = [datetime.fromtimestamp(run["started"]).astimezone().isoformat(timespec="seconds") for run in runs]
    data = {"runs": [{**run, "started": at} for run, at in zip(runs, started, strict=True)]}
    now, count = time.time(), f"{len(runs)} run{'s' if len(runs) > 1 else ''}"
    text = table(f"{count} in {flags.folder}", _HEADER, [_row(run, now) for run in runs])
    show(flags, data, text if runs else f"no runs in {flags.folder}")


def _row(run: Mapping[str, Any], now: float) -> tuple[str, ...]:
    asked = "" if run["steps_asked"] is None else f"/{run['steps_asked']}"
    return (
        run["name"],
        run["state"],
        "" if run["steps"] is None else f"{run['steps']}{asked}",
        _percent(run["validation_success"]),
        _percent(run["held_out_success"]),
        "" if run["calls"] is None else f"{run['calls']:,}",
        _age(now - run["started"]),
    )


def _percent(rate: float | None) -> str:
    return "" if rate is None else f"{100 * rate:.1f}"


def _age(seconds: float) -> str:
    for size, unit in _AGES:
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


@dataclass(frozen=True, kw_only=True)
class CompareFlags(JsonFlags):
    """Compare Query Mutator runs question by question: gained, lost, same, McNemar's p, the difference, its interval.

    Only questions that both runs have count. For metrics over steps, several seeds, or runs of any trainer,
    use `qm analyze`.
    """

    runs: Positional[tuple[str, ...]] = ()
    """Run folders, or files of `qm eval --evaluation`: 2 or more."""
    method: tuple[str, ...] = ("policy",)
    """Method of the evaluation to compare, as policy, best_plan or identity: one for all runs, or one for each."""

    def __post_init__(self) -> None:
        if not 2 <= len(self.runs) <= MOST_RUNS:
            raise ValueError(f"runs named: {len(self.runs)}; give 2 to {MOST_RUNS}, one may be given twice")
        if len(self.method) not in (1, len(self.runs)):
            raise ValueError(
                f"--method has {len(self.method)} names for {len(self.runs)} runs; give one, or one for each"
            )
        if len({(Path(run).resolve(), method) for run, method in self.named()}) < len(self.runs):
            raise ValueError("a run is compared with itself; give another run, or a --method for each")

    def named(self) -> list[tuple[Path, str]]:
        """Return path and method of each run."""
        methods = self.method if len(self.method) > 1 else self.method * len(self.runs)
        return [(Path(run), method) for run, method in zip(self.runs, methods, strict=True)]


def compare_runs(flags: CompareFlags) -> None:
    """Print the paired table, or write it with --json."""
    for path, _ in flags.named():
        if not path.exists():
            raise UsageError(f"{path}: no such run; give a run folder (qm runs lists them)")
    report = compare_entries([read_entry(path, method) for path, method in flags.named()])
    show(flags, report, paired_text(report))


# --- the pages of runs -----------------------------------------------------------------------------------------------


LATEST = "runs/latest"


@dataclass(frozen=True, kw_only=True)
class ReportFlags(OutputFlags):
    """Write one self-contained HTML page of a run, or of several paired by question."""

    runs: Positional[tuple[str, ...]] = ()
    """Run folders."""
    output: Annotated[str, Parameter(alias="-o"), Output(holding(MARK.encode()))] = REPORT_FILE
    """File to write."""

    def __post_init__(self) -> None:
        if not self.runs and not Path(LATEST).is_dir():
            raise ValueError("no run is named; give run folders such as runs/latest")
        object.__setattr__(self, "runs", self.runs or (LATEST,))


@dataclass(frozen=True, kw_only=True)
class ShowFlags:
    """Open the page of a run in the browser; write it first if it is missing or older than the run."""

    run: Positional[str] = LATEST
    """Run folder."""


def report(flags: ReportFlags) -> None:
    """Write the page, and print where it is."""
    write_page(flags.runs, flags.output)
    print(flags.output)


def show_page(flags: ShowFlags) -> None:
    """Write the page where it is missing or old, and open it; print where it is."""
    folder = Path(flags.run).resolve()
    if not folder.is_dir():
        raise UsageError(f"{flags.run}: no run folder; give one such as runs/latest")
    path = folder / REPORT_FILE
    written = [file.stat().st_mtime for file in folder.iterdir() if file.is_file() and file != path]
    is_old = not path.exists() or path.stat().st_mtime < max(written, default=0.0)
    if is_old or run_state(folder) != "finished":
        write_page([folder], path)
    print(path)
    if not webbrowser.open(path.as_uri()):
        note("no browser could be started; open the file in one")


@dataclass(frozen=True, kw_only=True)
class WatchFlags:
    """Show the pages of runs in a browser while they train, served only to this machine until Ctrl-C."""

    run: Positional[str] = "runs/latest"
    """Run folder, which may not exist yet, or a folder of runs; all runs of its folder are served."""
    port: Port = 0
    """Port of 127.0.0.1; 0 takes a free one."""
    browser: bool = True
    """Open the page in the default browser."""

    def __post_init__(self) -> None:
        if Path(self.run).exists() and not Path(self.run).is_dir():
            raise UsageError(f"{self.run} is a file; give a run folder such as runs/latest")


def watch(flags: WatchFlags) -> None:
    """Serve the pages until interrupted."""
    run = Path(os.path.abspath(flags.run))  # a link such as latest stays one
    holds_runs = any(run.glob("*/config.json"))
    folder, page = (run, "") if holds_runs else (run.parent, f"{quote(run.name)}/")

    def listening(url: str) -> None:
        print(f"{flags.run}: {url}{page} (Ctrl-C to stop)", flush=True)
        if flags.browser and not webbrowser.open(url + page):
            note("no browser could be started; open the address in one")

    serve_pages(folder, port=flags.port, on_listening=listening)
