"""Estimate sizes before a run: memory of a training step without a GPU, data-loader workers, calls in flight.

`memory.estimate(workload, batch, recipe)` tracks a step on tensors without data; `presets` names workloads, and
`cards` says what fits a card. `workers.Tuner` searches for the number of loader processes; `collecting` sizes replay
buffers and model servers. Nothing here imports `llm` or `training`; import from the modules, which load torch only
where they need it.
"""

__all__: list[str] = []
