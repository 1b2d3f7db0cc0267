"""Evaluation on held-out questions: the policy next to the baselines, with intervals.

`methods` runs every method on the same questions, `outcomes` summarizes the results; `heldout` has the periodic
evaluation during training and the final comparison, which `qm eval` repeats.
"""

__all__ = ["heldout", "methods", "outcomes"]
