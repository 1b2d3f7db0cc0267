"""Experiment trackers: each named by --track is fed by a process that follows the run folder (`follow`).

The trainer only starts and ends these processes, so a tracker that fails or hangs cannot slow or end it. What a tracker
has not taken stays in the folder.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from query_mutator.errors import UsageError
from query_mutator.files import read_checked_json

__all__ = ["FAILED", "TRACKING", "TrackFlags", "Tracker", "check_trackers", "tracked"]

Tracker = Literal["wandb", "trackio", "mlflow"]

TRACKING = "tracking"  # folder in a run folder: what each tracker has, and what it printed
FAILED = 3  # exit code of a process that has printed why its tracker does not have all
END_S = 30.0  # for a tracker to take the last rows and the summary at the end of a run
_ROOT = str(Path(__file__).resolve().parents[2])


@dataclass(frozen=True, kw_only=True)
class TrackFlags:
    """Experiment trackers; TensorBoard files are always written."""

    track: tuple[Tracker, ...] = ()
    """Trackers that get a copy of the run's config, metrics and summary: wandb, trackio, mlflow."""
    track_project: str = "query-mutator"
    """Project of the run in the trackers; in MLflow the experiment."""
    track_group: str | None = None
    """Group of the run in the trackers; by default --name, else the learner."""


def check_trackers(names: tuple[Tracker, ...]) -> None:
    """Raise a UsageError for a tracker whose package is not installed."""
    for name in names:
        try:
            metadata.distribution(name)  # a folder ./wandb could be imported, which wandb itself leaves
        except metadata.PackageNotFoundError:
            raise UsageError(f"--track {name} needs the package {name}; install it with: pip install {name}") from None


def _command(folder: Path, tracker: Tracker) -> list[str]:
    """Return the command that sends a tracker what it lacks of a run."""
    return [sys.executable, "-m", "query_mutator.files.follow", str(folder), tracker]


@contextmanager
def tracked(folder: Path, settings: TrackFlags, *, show: Callable[[str], None] = print) -> Iterator[None]:
    """Feed the trackers that the settings name while the block writes a run folder.

    Without an error in the block the run is finished, and the trackers have `END_S` to take the rest; after an error or
    an interruption they take it while this process ends.
    """
    names = tuple(dict.fromkeys(settings.track))
    followers = {name: _start(folder, name, settings) for name in names}
    state = "crashed"
    try:
        yield
        state = "finished"
    except KeyboardInterrupt:
        state = "interrupted"
        raise
    finally:
        for process in followers.values():
            _say(process, state)
        if state == "finished":
            _wait(folder, followers, show)


def _start(folder: Path, name: Tracker, settings: TrackFlags) -> subprocess.Popen[bytes]:
    """Start the process of a tracker; it is in its own session, so Ctrl-C in the terminal does not end it."""
    names = [settings.track_project, *([settings.track_group] if settings.track_group is not None else [])]
    path = os.pathsep.join([_ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [*_command(folder, name), *names],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,
    )


def _say(process: subprocess.Popen[bytes], state: str) -> None:
    """Report how the run ended to a process, unless it has ended itself."""
    assert process.stdin is not None
    with contextlib.suppress(OSError), process.stdin as pipe:
        pipe.write(state.encode())


def _wait(folder: Path, followers: dict[Tracker, subprocess.Popen[bytes]], show: Callable[[str], None]) -> None:
    """Wait for the trackers; show where each has the run, or one line about one that hangs or died."""
    ends = time.monotonic() + END_S
    for name, process in followers.items():
        try:
            code = process.wait(max(0.0, ends - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        if not code:
            show(f"{name}: {read_checked_json(folder / TRACKING / f'{name}.json')['view']}")
        elif code != FAILED:
            command = " ".join(_command(folder, name)[1:])
            show(f"{name} did not take the whole run; send what it lacks with: python {command} </dev/null")
