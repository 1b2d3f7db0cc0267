"""The trials of a sweep on an engine: finished trials are skipped on a rerun, failures are recorded.

DIR/sweep.json                what is run, so that a folder is not used for two sweeps
DIR/trials.jsonl              a row for each trial that ended: name, setting, seed, status, exit code, seconds
DIR/trials/NAME/              what the trial wrote, with command.txt, stdout.txt and stderr.txt
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from dataclasses import asdict
from pathlib import Path

from query_mutator.cli.console import closing_on_interrupt, progress
from query_mutator.errors import UsageError
from query_mutator.files import read_checked_json, write_checked_json
from query_mutator.files.json_lines import JsonLines, read_json_lines
from query_mutator.lab.sweep.engines import Ended, Engine, Job
from query_mutator.lab.sweep.plan import Trial

__all__ = ["Runner", "SweepFolder"]


class SweepFolder:
    """The folder of a sweep. UsageError when it holds a sweep of another command."""

    def __init__(self, path: Path, **about: str) -> None:
        self.path, self.rows_path = path, path / "trials.jsonl"
        file = path / "sweep.json"
        if not file.exists():
            write_checked_json(file, about)
        elif (before := read_checked_json(file)) != about:
            what = next((name for name in about if before.get(name) != about[name]), "command")
            raise UsageError(f"{path} holds a sweep of another {what} ({before.get(what)}); choose another --out")

    def folder_of(self, trial: Trial) -> Path:
        """Return where a trial writes."""
        return self.path / "trials" / trial.name

    def ended(self) -> dict[str, Ended]:
        """Return how each trial ended, by its last row."""
        rows = read_json_lines(self.rows_path) if self.rows_path.exists() else ()
        try:
            return {row["name"]: Ended(**row) for row in rows}
        except (KeyError, TypeError) as error:
            raise UsageError(f"{self.rows_path}: a row is not a trial ({error}); choose another --out") from None


class Runner:
    """Runs trials of a command on an engine."""

    def __init__(
        self, folder: SweepFolder, engine: Engine, *, command: Sequence[str], timeout_min: float | None = None
    ) -> None:
        self.folder, self.engine, self.command = folder, engine, tuple(command)
        self.timeout_s = timeout_min * 60 if timeout_min else None

    def run(
        self, trials: Sequence[Trial], *, retry_failed: bool = False, again: Collection[str] = ()
    ) -> dict[str, Ended]:
        """Run the trials that have not ended yet, and those named in `again`; return how each ended.

        A failed trial does not stop the others.
        """
        before = self.folder.ended()
        jobs = [
            Job(trial=trial, command=self.command, folder=self.folder.folder_of(trial), timeout_s=self.timeout_s)
            for trial in trials
            if trial.name not in before or trial.name in again or (retry_failed and before[trial.name].status != "done")
        ]
        rows = JsonLines(self.folder.rows_path)
        with (
            contextlib.closing(rows),
            closing_on_interrupt(self.engine.stop),
            contextlib.closing(self.engine.run(jobs)) as ended,
            progress("sweep", len(jobs), unit="trial") as bar,
        ):
            for one in ended:
                rows.append(asdict(one))
                bar.update()
        ended_now = self.folder.ended()
        return {trial.name: ended_now[trial.name] for trial in trials if trial.name in ended_now}
