"""Sweeps: run a command over a grid of settings and seeds, and estimate which setting is best and how certain that is.

`config` holds the flags, `plan` makes trials of them, `runner` runs the missing ones on an engine (`engines` has the
protocol, `processes` the engine of this machine, `cluster.jobs` that of Ray), `results` reads their numbers, `surface`
fits a response surface and tests its optimum, `search` asks Optuna for settings, `picture` draws a heat map, and
`job.Sweep` does all of that in order. Imports analysis, stats, cli and files. `config` is light, the other modules load
numpy, scipy or matplotlib.
"""

from __future__ import annotations

from query_mutator.lab.sweep.config import SweepFlags

__all__ = ["SweepFlags"]
