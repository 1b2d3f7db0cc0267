"""Evaluation on held-out questions: the policy next to the baselines, with intervals.

`methods` runs every method on the same questions, `outcomes` summarizes the results; `heldout` has the final
comparison, which `qm eval` repeats, and `validation` the periodic evaluation during training, on other questions.
"""

__all__ = ["heldout", "methods", "outcomes", "validation"]
