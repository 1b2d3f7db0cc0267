"""Log a run to MLflow: `qm train --plugin examples/mlflow_callback.py`, with `--resume` too."""

import json

import mlflow

from query_mutator.training.callbacks import CALLBACKS, Callback


@CALLBACKS.register("mlflow")
class Mlflow(Callback):
    def on_training_start(self, run):
        config = json.loads((run.folder / "config.json").read_text())  # without credentials
        name = run.folder.name
        mlflow.set_experiment("query-mutator")
        known = mlflow.search_runs(filter_string=f"tags.folder = '{name}'", output_format="list")
        if known:
            mlflow.start_run(run_id=known[0].info.run_id)
        else:
            mlflow.start_run(run_name=name, tags={"folder": name})
            mlflow.log_params(config["flags"])
        mlflow.log_dict(config, "config.json")

    def on_update_end(self, run):
        if run.row:
            mlflow.log_metrics(run.row, step=run.env_steps)

    def on_training_end(self, run):
        mlflow.log_dict(json.loads((run.folder / "summary.json").read_text()), "summary.json")

    def close(self, error):
        mlflow.end_run("FINISHED" if error is None else "FAILED")
