"""Prompts that do not fit a model's context: lines, the progress bar's figure, a metric."""

from __future__ import annotations

from query_mutator.cli.console import note
from query_mutator.session.truncation import LongPrompts
from query_mutator.training.callbacks.base import Callback, RunView
from query_mutator.training.parts import RunParts


class LongPromptReport(Callback):
    """Report prompts that were too long, during the run and at its end."""

    def __init__(self, parts: RunParts) -> None:
        self._found = LongPrompts(parts.env_list, parts.models.calls.backend_class.more_context)
        self._runlog = parts.runlog

    def on_rollout_end(self, run: RunView) -> None:
        """Print a line for each new question, and show the number."""
        self._runlog.show(self._found.shown())
        note(*self._found.new_warnings())

    def on_log(self, run: RunView) -> None:
        """Add the number to the row."""
        run.row["llm/prompts_too_long"] = self._found.counts.total()

    def on_training_end(self, run: RunView) -> None:
        """Print the sum."""
        note(*self._found.lines())
