"""`qm watch`: the pages of runs, in a browser on this machine, each loaded again when it is written again."""

from __future__ import annotations

import os
import webbrowser
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from tyro.conf import Positional

from query_mutator.bounds import Port
from query_mutator.cli.console import note
from query_mutator.errors import UsageError
from query_mutator.report.page.watch import serve_pages

__all__ = ["WatchFlags", "watch"]


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
