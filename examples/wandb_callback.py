"""Log a run to Weights & Biases: `qm train --plugin examples/wandb_callback.py`, with `--resume` too."""

import json

import wandb

from query_mutator.training.callbacks import CALLBACKS, Callback


@CALLBACKS.register("wandb")
class Wandb(Callback):
    tracked = None

    def on_training_start(self, run):
        config = json.loads((run.folder / "config.json").read_text())  # without credentials
        name = run.folder.name
        self.tracked = wandb.init(
            project="query-mutator", id=name, name=name, config=config, dir=run.folder, resume="allow"
        )

    def on_update_end(self, run):
        if run.row:
            self.tracked.log(run.row, step=run.env_steps)

    def on_training_end(self, run):
        self.tracked.summary.update(json.loads((run.folder / "summary.json").read_text()))

    def close(self, error):
        if self.tracked is not None:
            self.tracked.finish(exit_code=0 if error is None else 1)
