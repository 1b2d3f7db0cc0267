"""Evaluation of a policy: on validation questions during training, on held-out questions at its end, with intervals.

heldout      the periodic evaluation during training, and the final comparison, which `qm eval` repeats
comparison   the methods it compares, and which of them depends on results of others
methods      one pool of calls for all methods and questions
outcomes     the result of a method on a question
summary      rates, differences, groups and front; what to deploy, in one sentence
cost         the calls it makes at most, and the questions that fit into a number of calls
"""

__all__ = ["comparison", "cost", "heldout", "methods", "outcomes", "summary"]
