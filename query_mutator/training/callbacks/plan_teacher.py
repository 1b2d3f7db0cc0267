"""Imitation of the best plan: `--teacher search`."""

from __future__ import annotations

from dataclasses import replace

from query_mutator.cli.console import note, progress
from query_mutator.evaluation.found_plan import FoundPlan, load_or_search, search_plan
from query_mutator.training.callbacks.base import Callback, RunView
from query_mutator.training.config import SEARCH
from query_mutator.training.known_steps import recall
from query_mutator.training.learner import teach
from query_mutator.training.parts import RunParts, server_worked_before


class PlanTeacher(Callback):
    """Search for the best plan before training, and have the learner start from it and from the search's calls.

    A resumed run has the plan in its folder, and what was learned from the calls in its checkpoint.
    """

    def __init__(self, parts: RunParts) -> None:
        self._parts = parts
        self.plan: FoundPlan | None = None  # also a row of the comparison

    def on_training_start(self, run: RunView) -> None:
        """Search, unless another teacher or none is asked for."""
        if run.config.teacher != SEARCH:
            return
        self.plan = load_or_search(self._parts.run_dir.plan_path, self._search)
        note(f"teacher: {self.plan.teacher}")
        teach(self._parts.learner, self.plan.teacher, self._parts.task, run.config)
        if not self._parts.learner.updates_done:
            recall(self._parts.learner, self._parts.task, self.plan.memories, seed=run.config.seed)
        self.plan = replace(self.plan, memories={})  # some 3 kB for each answer

    def _search(self) -> FoundPlan:
        parts = self._parts
        calls, seed = parts.config.plan_calls, parts.config.seed
        with server_worked_before():
            return search_plan(parts.evaluator, parts.task, max_calls=calls, seed=seed, progress=progress)
