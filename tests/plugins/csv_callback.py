"""A callback of one's own: a CSV file with a row per rollout, which a resumed run continues."""

import os

from query_mutator.training.callbacks import CALLBACKS, Callback


@CALLBACKS.register("csv")
class CsvLog(Callback):
    def __init__(self):
        self.bytes = 0  # of the file at the last checkpoint
        self.steps = 0  # of the rollout

    def on_training_start(self, run):
        self.file = (run.folder / "rollouts.csv").open("a+b")
        self.file.truncate(self.bytes)

    def on_step(self, run, steps, records):
        self.steps += len(records)

    def on_rollout_end(self, run):
        self.file.write(f"{run.env_steps},{self.steps}\n".encode())
        self.file.flush()
        self.bytes, self.steps = self.file.tell(), 0
        if str(run.env_steps) == os.environ.get("KILLED_AT"):
            os._exit(9)  # as a killed run ends

    def on_log(self, run):
        run.row["custom/csv_bytes"] = self.bytes

    def close(self, error):
        self.file.close()

    def state_dict(self):
        return {"bytes": self.bytes}

    def load_state_dict(self, state):
        self.bytes = state["bytes"]
