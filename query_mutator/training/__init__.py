"""Training: the flags, the loops that collect and update, and what continues a run.

`config` has every flag; `loop` collects rollouts and learns; `callbacks` hang on it, and compute the rows of metrics;
`run_folder` writes a run and continues it; `export` writes its files of other kinds; `estimate` says what a run costs.
`train_query_mutator.py` calls them in order.
"""

__all__ = ["callbacks", "config", "estimate", "export", "loop", "run_folder"]
