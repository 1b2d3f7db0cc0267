"""Estimate sizes before a run: memory of a training step without a GPU, data-loader workers, calls in flight.

    workload.py    what to train and how: `Workload`, `Recipe`
    memory.py      `estimate(workload, batch, recipe)` tracks a step on tensors without data; `largest_batch`
    models.py      workloads by name
    sizes.py       memory of cards, and models from a table (sizes.toml)
    workers.py     `Tuner`: how many processes a data loader needs
    collecting.py  replay buffers, rollouts, model servers

Import from the modules; those that need torch load it, this package and `workload` do not.
"""

from query_mutator.lab.sizing.workload import Recipe, Workload

__all__ = ["Recipe", "Workload"]
