"""Reward parts: named scores in [0, 1] of one answer, weighted into one reward.

Offers `WeightedReward` (built from `right=0.7,similarity=0.3`), `NoReward` for acting, the `Judge` behind the part
`judge`, the registry `PARTS` to add your own part, the `Evidence` a part is given, and the verdicts `is_refusal` and
`is_not_sure`. A part is a function of the evidence, or a generator function that asks a model: it yields ChatRequests
and is sent their Completions.
"""

from query_mutator.rewards import committed as _committed  # noqa: F401  registers its part
from query_mutator.rewards.judge import DEFAULT_RUBRIC, Judge
from query_mutator.rewards.matching import OPENING_CHARS, first_sentence, is_not_sure, is_refusal
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
    "DEFAULT_RUBRIC", "DEFAULT_WEIGHTS", "OPENING_CHARS", "PARTS", "Evidence", "Judge", "NoReward", "Part",
    "Scoring", "Unscored", "WeightedReward", "cosine", "first_sentence", "is_not_sure", "is_refusal",
]  # fmt: skip
