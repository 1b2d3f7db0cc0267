"""Training: the flags, the loops that collect and update, and what continues a run.

`config` has every flag; `on_policy` and `off_policy` are the loops of `loop`, whose steps `collector` takes;
`callbacks` hang on them; `resume` continues a run;
`run_log` computes the rows of metrics; `estimate` says what a run costs. `train_query_mutator.py` calls them in order.
"""

__all__ = [
    "callbacks", "collector", "config", "estimate", "export", "learner", "loop", "off_policy", "on_policy",
    "resume", "run_log", "workers",
]  # fmt: skip
