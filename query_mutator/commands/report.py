"""`qm report`, `qm show` and `qm watch`: the pages of runs, written to a file, opened or kept open in a browser."""

from __future__ import annotations

import os
import webbrowser
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

from cyclopts import Parameter

from query_mutator.bounds import Port
from query_mutator.cli.console import note
from query_mutator.cli.flags import Positional
from query_mutator.cli.outputs import Output, OutputFlags, holding
from query_mutator.errors import UsageError
from query_mutator.files.run_dir import run_state
from query_mutator.report.build import MARK, REPORT_FILE, write_page
from query_mutator.report.watch import serve_pages

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
    """Open the page of a run in the browser; it is written first where it is missing or older than the run."""

    run: Positional[str] = LATEST
    """Run folder."""


def report(flags: ReportFlags) -> None:
    """Write the page, and print where it is."""
    write_page(flags.runs, flags.output)
    print(flags.output)


def show(flags: ShowFlags) -> None:
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
    """Show the pages of runs in a browser while they train; they are served to this machine only, until Ctrl-C."""

    run: Positional[str] = "runs/latest"
    """Run folder, which may not exist yet, or a folder of runs; the other runs of its folder are served too."""
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
