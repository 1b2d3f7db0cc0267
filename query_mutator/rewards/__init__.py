"""What makes one answer better than another: named parts in [0, 1], weighed into one score."""

from query_mutator.rewards.parts import PARTS, Evidence, cosine
from query_mutator.rewards.verdicts import is_not_sure, is_refusal
from query_mutator.rewards.weighted import DEFAULT_WEIGHTS, WeightedReward

__all__ = ["DEFAULT_WEIGHTS", "PARTS", "Evidence", "WeightedReward", "cosine", "is_not_sure", "is_refusal"]
