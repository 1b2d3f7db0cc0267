"""Follow a run folder and feed one tracker, until the run ends: `python -m query_mutator.files.follow RUN TRACKER`.

    tracking/TRACKER.json    the run's id there, the step of the last row that was sent, how many rows of that step were
    tracking/TRACKER.log     what the tracker printed

Standard input says how the run ended; it ends without a word when the trainer is killed. By hand, `</dev/null`, the
command sends what a tracker lacks of a run that has ended. Rows are read from metrics.jsonl, which is the queue: a slow
tracker takes no memory. When a run resumes, rows are taken again that its checkpoint did not have; those that the
tracker already has by their step are not sent again.
"""

from __future__ import annotations

import os
import secrets
import select
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO, cast

from filelock import FileLock

from query_mutator.errors import hide_credentials
from query_mutator.files import read_checked_json, write_checked_json
from query_mutator.files.json_lines import JsonRow, scan_json_lines
from query_mutator.files.metrics import METRICS_FILE
from query_mutator.files.run_dir import SUMMARY
from query_mutator.files.state import run_state
from query_mutator.files.trackers import Sink, TrackedRun, open_sink
from query_mutator.files.tracking import FAILED, TRACKING, Tracker, TrackFlags

__all__ = ["Follower", "main"]

POLL_S = 1.0
RETRY_S = 30.0  # after a failure of the tracker
PREDECESSOR_S = 60.0  # for the process of the part of the run before to end
#: Trackers report their use to their makers unless asked not to.
_QUIET = {"MLFLOW_DISABLE_TELEMETRY": "true", "WANDB_ERROR_REPORTING": "false", "HF_HUB_DISABLE_TELEMETRY": "1"}


class Follower:
    """Sends a tracker the rows of a run that it lacks; remembers in a file which it has."""

    def __init__(self, folder: Path, tracker: Tracker, *, project: str, group: str | None) -> None:
        self._folder, self._tracker, self._group = folder, tracker, group
        self._path = folder / TRACKING / f"{tracker}.json"
        before = read_checked_json(self._path) if self._path.exists() else {}
        self._project = before.get("project", project)
        self._id = before.get("id") or secrets.token_hex(4)
        self._sent: tuple[int, int] = (before.get("step", -1), before.get("rows", 0))
        self._sink: Sink | None = None
        self._last: JsonRow | None = None  # of metrics.jsonl that was looked at
        self._seen: tuple[int, int] = (-1, 0)

    def catch_up(self) -> None:
        """Send the rows that were written since the last call."""
        try:
            for row, seen in self._rows():
                if seen > self._sent:
                    self._open().log(row, step=seen[0])
                    self._sent = seen
        finally:
            if self._sink is not None:
                self._remember()

    def finish(self, state: str) -> None:
        """Send what is left, the summary of a finished run, and the state."""
        if not (self._folder / "config.json").exists():
            return  # it ended before it began
        self.catch_up()
        summary = read_checked_json(self._folder / SUMMARY) if state == "finished" else {}
        self._open().finish(state, summary)

    def _rows(self) -> Iterator[tuple[dict[str, float], tuple[int, int]]]:
        """Yield each whole new row without its step, with (step, rows of that step so far)."""
        path = self._folder / METRICS_FILE
        for row in scan_json_lines(path, after=self._last) if path.exists() else ():
            step = row.value.pop("step")
            count = self._seen[1] + 1 if step == self._seen[0] else 1
            yield row.value, (step, count)
            self._last, self._seen = row, (step, count)

    def _open(self) -> Sink:
        if self._sink is None:
            config = read_checked_json(self._folder / "config.json")
            self._remember()  # the id, before the tracker has it
            run = TrackedRun(
                id=self._id,
                folder=self._folder,
                project=self._project,
                group=self._group or _group(config),
                config=config,
                tags=_tags(config),
            )
            self._sink = open_sink(self._tracker, run)
        return self._sink

    def _remember(self) -> None:
        step, rows = self._sent
        view = self._sink.view if self._sink is not None else None
        known = {"id": self._id, "project": self._project, "view": view, "step": step, "rows": rows}
        write_checked_json(self._path, known)


def _group(config: dict[str, Any]) -> str | None:
    flags: dict[str, str | None] = config.get("flags", {})
    return flags.get("name") or flags.get("algo")


def _tags(config: dict[str, Any]) -> dict[str, str]:
    """Return seed, learner and models."""
    flags, models = config.get("flags", {}), config.get("backend") or {}
    found = {
        "seed": flags.get("seed"),
        "algo": flags.get("algo"),
        "target_model": models.get("target_model"),
        "mutator_model": models.get("mutator_model"),
        "model": flags.get("model"),
    }
    return {name: str(value) for name, value in found.items() if value is not None}


def main(argv: Sequence[str]) -> int:
    """Follow a run until it ends; return `FAILED` if the tracker does not have all of it."""
    folder, tracker = Path(argv[0]).resolve(), cast(Tracker, argv[1])
    project, group = [*argv[2:], None, None][:2]
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    (folder / TRACKING).mkdir(exist_ok=True)
    warn = _Warning(tracker, _own_stderr(folder / TRACKING / f"{tracker}.log"))
    with FileLock(folder / TRACKING / f"{tracker}.lock", timeout=PREDECESSOR_S):
        follower = Follower(folder, tracker, project=project or TrackFlags.track_project, group=group)
        retry_at = 0.0
        while (state := _end_of_run(folder)) is None:
            if time.monotonic() >= retry_at and not warn.works(follower.catch_up):
                retry_at = time.monotonic() + RETRY_S
        return 0 if warn.works(lambda: follower.finish(state)) else FAILED


class _Warning:
    """One line on the run's standard error about a tracker that fails, however often it does."""

    def __init__(self, tracker: Tracker, stderr: TextIO) -> None:
        self._tracker, self._stderr, self._is_shown = tracker, stderr, False

    def works(self, act: Callable[[], None]) -> bool:
        """Return whether `act` raises no error; print the first one."""
        try:
            act()
        except Exception as error:  # of any kind: the tracker's code is not ours
            traceback.print_exc()  # into its log
            if not self._is_shown:
                self._is_shown = True
                reason = hide_credentials(" ".join(str(error).split())[:300]) or type(error).__name__
                said = f"{self._tracker} failed: {reason}; the run continues, its rows stay in {METRICS_FILE}"
                print(said, file=self._stderr, flush=True)
            return False
        return True


def _own_stderr(log: Path) -> TextIO:
    """Return the standard error of the run; what is printed from here on, also by child processes, goes to the log."""
    stderr = os.fdopen(os.dup(sys.stderr.fileno()), "w")
    if log.is_symlink():  # of a stranger's run folder
        log.unlink()
    with log.open("ab") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    return stderr


def _end_of_run(folder: Path) -> str | None:
    """Wait a while; return how the run ended, None while it is running."""
    ready, _, _ = select.select([sys.stdin], [], [], POLL_S)
    if not ready:
        return None
    word = sys.stdin.read()
    if word:
        return str(word)
    state = run_state(folder)
    return "killed" if state == "running" else state  # its process may be dead and not collected yet


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
