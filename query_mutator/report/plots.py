"""The plots of a finished run: the learning curve and the page."""

from __future__ import annotations

from query_mutator.report.curve import draw_learning_curve
from query_mutator.report.page.build import write_report
from query_mutator.training.callbacks.base import Callback, RunView
from query_mutator.training.parts import RunParts

__all__ = ["Plots"]


class Plots(Callback):
    """Draw the learning curve and write the page at the end of a run."""

    def __init__(self, parts: RunParts) -> None:
        self._models, self._run_dir = parts.models, parts.run_dir

    def on_training_end(self, run: RunView) -> None:
        """Draw, write, and print where everything is."""
        title = f"{self._models.target_model}, seed {run.config.seed}"
        draw_learning_curve(self._run_dir.metrics_path, self._run_dir.curve_path, title=title)
        print(f"learning curve: {self._run_dir.curve_path}")
        if page := write_report(run.folder):
            print(f"report:         {page}")
