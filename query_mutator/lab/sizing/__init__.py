"""Estimate sizes before a run: memory of a training step without a GPU, data-loader workers, calls in flight.

    sizes.py       what to train and how (`Workload`, `Recipe`), memory of cards, models from a table (sizes.toml)
    memory.py      `estimate(workload, batch, recipe)` tracks a step on tensors without data; `largest_batch`
    models.py      workloads by name
    workers.py     how many processes a data loader needs
    collecting.py  replay buffers, rollouts, model servers

Import from the modules; those that need torch load it, this package and `sizes` do not.
"""

from query_mutator.lab.sizing.sizes import Recipe, Workload

__all__ = ["Recipe", "Workload"]
