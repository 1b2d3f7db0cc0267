"""`qm watch`: the page of running runs, in a browser on this machine."""

from __future__ import annotations

import asyncio
import webbrowser
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from query_mutator.bounds import Port
from query_mutator.cli.console import note
from query_mutator.errors import UsageError
from query_mutator.report.page.build import live_page
from query_mutator.report.page.live import LivePage, serve_live
from query_mutator.report.page.run_reader import RunReader

__all__ = ["WatchFlags", "watch"]


@dataclass(frozen=True, kw_only=True)
class WatchFlags:
    """Show the page of runs in a browser while they train; it is served to this machine only, until Ctrl-C."""

    runs: Positional[tuple[str, ...]] = ("runs/latest",)
    """Run folders; one that does not exist yet is waited for."""
    port: Port = 0
    """Port of 127.0.0.1; 0 takes a free one."""
    browser: bool = True
    """Open the page in the default browser."""

    def __post_init__(self) -> None:
        for run in self.runs:
            if Path(run).exists() and not Path(run).is_dir():
                raise UsageError(f"{run} is a file; give a run folder such as runs/latest")


def watch(flags: WatchFlags) -> None:
    """Serve the page until interrupted."""
    folders = [Path(run) for run in flags.runs]

    def listening(url: str) -> None:
        print(f"{', '.join(flags.runs)}: {url} (Ctrl-C to stop)", flush=True)
        if flags.browser and not webbrowser.open(url):
            note("no browser could be started; open the address in one")

    live = LivePage(folders, page=live_page(), open_reader=lambda folder, run: RunReader(folder, run=run))
    asyncio.run(serve_live(live, port=flags.port, on_listening=listening))
