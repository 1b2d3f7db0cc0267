"""Evaluation of a policy: on validation questions during training, on held-out questions at its end, with intervals.

heldout      the periodic evaluation during training, and the final comparison, which `qm eval` repeats; its cost
comparison   the methods it compares, which of them depends on results of others, and one pool of calls for all
summary      outcomes, rates, differences, groups and front; what to deploy, in one sentence
"""

__all__ = ["comparison", "heldout", "summary"]
