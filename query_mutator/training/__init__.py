"""Training: flags, learners by name, the loops that collect and update, checkpoints, and resuming.

`config` has every flag; `system` starts server, client and encoder, and builds the task; `learner` is the Protocol,
`learners` the registry, `ppo_learner` an example; `on_policy` and `off_policy` are the loops of `loop`; `checkpoint`,
`journal` and `resume` continue a run. `train_query_mutator.py` calls them in order.
"""

__all__ = [
    "checkpoint",
    "config",
    "estimate",
    "failure_rate",
    "journal",
    "learner",
    "learners",
    "loop",
    "off_policy",
    "on_policy",
    "ppo_learner",
    "resume",
    "system",
]
