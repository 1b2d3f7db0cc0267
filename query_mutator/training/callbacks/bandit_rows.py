"""Transitions for the bandit of the result table."""

from __future__ import annotations

from collections.abc import Sequence

from query_mutator.env.steps import Steps
from query_mutator.training.callbacks.base import Callback, RunView
from query_mutator.training.parts import RunParts
from query_mutator.types import StepRecord


class BanditRows(Callback):
    """Feed the finished episodes of a run to the bandit that the policy is compared with."""

    def __init__(self, parts: RunParts) -> None:
        self._bandit = parts.bandit

    def on_step(self, run: RunView, steps: Steps, records: Sequence[StepRecord]) -> None:
        """Keep the steps."""
        self._bandit.observe(steps)

    def on_rollout_end(self, run: RunView) -> None:
        """Add the episodes that have ended to the sums."""
        self._bandit.flush()
