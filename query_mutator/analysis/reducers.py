"""How a curve becomes one number; by itself, so that a command line can name them without loading numpy."""

from typing import Literal

Reducer = Literal[
    "last", "best_so_far", "mean_last_k", "auc", "time_to_threshold", "rate", "mean", "median", "max", "min"
]
