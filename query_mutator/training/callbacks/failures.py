"""Stop a run in which too many calls fail for good."""

from __future__ import annotations

from collections.abc import Sequence

from query_mutator.env.steps import Steps
from query_mutator.session.failure_rate import WINDOW_STEPS, FailureWindow
from query_mutator.training.callbacks.base import Callback, RunView
from query_mutator.training.parts import RunParts
from query_mutator.types import StepRecord


class FailureLimit(Callback):
    """Raise TooManyFailuresError when more than `--max-failure-rate` of the recent steps failed."""

    def __init__(self, parts: RunParts) -> None:
        self._calls = parts.models.calls
        size = min(WINDOW_STEPS, parts.config.rollout_steps)
        self._window = FailureWindow(parts.config.max_failure_rate, size=size, why=self._most_common_failure)

    def on_step(self, run: RunView, steps: Steps, records: Sequence[StepRecord]) -> None:
        """Count the steps."""
        self._window.add(steps.valid)

    def _most_common_failure(self) -> str:
        [(kind, _)] = self._calls.counted.error_kinds.most_common(1) or [("", 0)]
        advice = f" ({self._calls.backend_class.more_context})" if kind == "prompt_too_long" else ""
        return f", most often {kind!r}{advice}" if kind else ""
