"""Reward parts: named scores in [0, 1] of one answer, weighted into one reward.

Offers `WeightedReward` (built from `right=0.7,similarity=0.3`), `NoReward` for acting, the `Judge` behind the part
`judge`, the registry `PARTS` to add your own part, and the `Evidence` a part is given. A part is a function of the
evidence, or a generator function that asks a model: it yields ChatRequests and is sent their Completions.
"""

from query_mutator.rewards.judge import DEFAULT_RUBRIC, Judge
from query_mutator.rewards.parts import (
    DEFAULT_WEIGHTS,
    PARTS,
    Evidence,
    NoReward,
    Part,
    Scoring,
    Unscored,
    WeightedReward,
    cosine,
)

__all__ = [
    "DEFAULT_RUBRIC", "DEFAULT_WEIGHTS", "PARTS", "Evidence", "Judge", "NoReward", "Part",
    "Scoring", "Unscored", "WeightedReward", "cosine",
]  # fmt: skip
