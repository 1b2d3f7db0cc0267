"""A toolkit next to the product: size a training before it runs, compare anyone's runs, search settings.

    sizing/      memory of a training step without a GPU, worker processes of a data loader, real steps
    analysis/    read what any trainer logged, group seeds, test differences, write reports
    sweep/       run a command over a grid, and estimate which setting is best and how certain that is

It imports the base (`errors`, `types`, `files`, `registry`, `plugins`, `stats`, `cli`) and `ppo`, nothing else of the
product; only `commands`, `report` and `cluster` import it. Loads no torch.
"""

__all__ = ["analysis", "sizing", "sweep"]
