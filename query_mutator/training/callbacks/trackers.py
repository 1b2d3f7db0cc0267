"""Experiment trackers, which follow the run folder while the run lasts."""

from __future__ import annotations

from contextlib import ExitStack

from query_mutator.cli.console import note
from query_mutator.files.tracking import tracked
from query_mutator.training.callbacks.base import Callback, RunView


class Trackers(Callback):
    """Start the trackers of `--track`, and report to them how the run ended."""

    def __init__(self) -> None:
        self._stack = ExitStack()

    def on_training_start(self, run: RunView) -> None:
        """Start a process for each tracker."""
        self._stack.enter_context(tracked(run.folder, run.config, show=note))

    def close(self, error: BaseException | None) -> None:
        """Wait for the trackers of a finished run."""
        self._stack.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)
