"""Sweeps: run a command over a grid of settings and seeds, and estimate which setting is best and how certain that is.

`trials` makes trials of the flags, `running` runs the missing ones on an engine (this machine; `cluster.jobs` has
Ray's), `results` reads their numbers, `surface` fits a response surface to the `cells` of the grid and tests its
optimum, and `job.Sweep` does all of that in order. Imports analysis, stats, cli and files.
"""

__all__: list[str] = []
