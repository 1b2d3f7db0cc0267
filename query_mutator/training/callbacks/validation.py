"""Periodic evaluations on validation questions."""

from __future__ import annotations

from query_mutator.cli.console import note
from query_mutator.evaluation.validation import PeriodicEval, make_periodic_eval
from query_mutator.training.callbacks.base import Callback, RunView
from query_mutator.training.parts import RunParts, server_worked_before


class Validation(Callback):
    """Evaluate the policy before the first update, every `updates_between_evals` updates, and after the last."""

    def __init__(self, parts: RunParts) -> None:
        self._parts = parts
        self._evaluate: PeriodicEval | None = None

    def on_training_start(self, run: RunView) -> None:
        """Prepare the evaluation; write the row of a new run."""
        config, parts = run.config, self._parts
        if config.updates_between_evals:
            self._evaluate = make_periodic_eval(
                parts.evaluator, parts.task, parts.split.validation, size=config.eval_questions
            )
        if config.validation_fold != "none" and not parts.split.validation:
            note(
                f"--validation-fold {config.validation_fold} holds none of the {len(parts.split.train)} questions to "
                "learn from, so there are no periodic evaluations; give another fold"
            )
        if self._evaluate and not run.env_steps:
            run.row = self._figures(self._evaluate, run)
            parts.run_dir.metrics.write(run.row, step=0, wall_s=parts.runlog.wall_s)

    def on_update_end(self, run: RunView) -> None:
        """Add the figures to the row when an evaluation is due."""
        if self._evaluate and (run.is_last or run.updates_done % run.config.updates_between_evals == 0):
            run.row |= self._figures(self._evaluate, run)

    def _figures(self, evaluate: PeriodicEval, run: RunView) -> dict[str, float]:
        with server_worked_before():
            row = evaluate(self._parts.learner.frozen)
        run.best_success = max(run.best_success, row["validation/success"])  # NaN leaves the first
        self._parts.runlog.validated(row["validation/success"])
        return {**row, "validation/best_success": run.best_success}
