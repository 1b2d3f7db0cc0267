"""A callback of one's own: a CSV file with a row per rollout, which a resumed run continues."""

import os

from query_mutator.training.callbacks import CALLBACKS, Callback


@CALLBACKS.register("csv")
class CsvLog(Callback):
    def __init__(self):
        self.steps = 0  # of the rollout

    def on_training_start(self, run):
        path = run.folder / "rollouts.csv"
        rows = path.read_text().splitlines() if path.exists() else []
        self.file = path.open("w")
        self.file.writelines(f"{row}\n" for row in rows if int(row.split(",")[0]) <= run.env_steps)

    def on_step(self, run, steps, records):
        self.steps += len(records)

    def on_rollout_end(self, run):
        self.file.write(f"{run.env_steps},{self.steps}\n")
        self.file.flush()
        self.steps = 0
        if str(run.env_steps) == os.environ.get("KILLED_AT"):
            os._exit(9)  # as a killed run ends

    def on_log(self, run):
        run.row["custom/csv_bytes"] = self.file.tell()

    def close(self, error):
        self.file.close()
