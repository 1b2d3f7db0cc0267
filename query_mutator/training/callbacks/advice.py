"""Advice on the server: it works on fewer calls at a time than it is sent."""

from __future__ import annotations

from collections.abc import Sequence

from query_mutator.cli.console import note
from query_mutator.env.steps import Steps
from query_mutator.llm.probe import reported_slots, slots_advice, slots_under_load
from query_mutator.training.callbacks.base import Callback, RunView
from query_mutator.training.parts import RunParts
from query_mutator.types import StepRecord

ADVICE_AFTER_CALLS = 6  # per call in flight: by then the server's queue shows


class SlotsAdvice(Callback):
    """Print once that the server works on fewer calls at a time than it is sent."""

    def __init__(self, parts: RunParts) -> None:
        self._models, self._runlog = parts.models, parts.runlog
        self._has_advised = bool(parts.config.local_server_url)  # servers on the workers' machines are not asked here

    def on_step(self, run: RunView, steps: Steps, records: Sequence[StepRecord]) -> None:
        """Print the advice when enough calls were made."""
        if self._has_advised:
            return
        in_flight = min(run.config.calls_in_flight, run.config.num_processes)
        calls = self._runlog.calls
        if calls.calls < ADVICE_AFTER_CALLS * in_flight:
            return
        self._has_advised = True
        stack = self._models.calls
        reported = reported_slots(stack.servers, self._models.target_model)
        is_measured = stack.backend_class.reports_queue
        slots = reported or (slots_under_load(calls, in_flight=in_flight) if is_measured else None)
        advice = slots_advice(slots, in_flight, server=stack.backend_class, is_reported=reported is not None)
        if advice is not None:
            note(advice)
