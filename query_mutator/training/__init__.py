"""Training: the flags, the loops that collect and update, and what continues a run.

`config` has every flag, and says what a run costs; `loop` collects rollouts and learns; `callbacks` hang on it, and
compute the rows of metrics; `run_folder` writes a run with its checkpoints, and continues it; `export` makes files of
other kinds of it.
`train_query_mutator.py` calls them in order.
"""

__all__ = ["callbacks", "config", "export", "loop", "run_folder"]
