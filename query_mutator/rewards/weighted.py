"""One score in [0, 1] from weighted parts."""

from __future__ import annotations

import inspect
import math
from collections.abc import Generator, Mapping
from dataclasses import replace
from typing import SupportsFloat

from query_mutator.errors import UsageError
from query_mutator.rewards.judge import Judge
from query_mutator.rewards.parts import COSINES, PARTS, Evidence
from query_mutator.types import UNSAFE, ChatRequest, Completion, Reward

#: Being right decides; the other parts separate near misses.
DEFAULT_WEIGHTS: Mapping[str, float] = {"right": 0.7, "similarity": 0.15, "answered": 0.1, "meaning": 0.05}


_ROUNDING = 1e-5  # a cosine of unit vectors in float32 may exceed 1 by this much


class WeightedReward:
    """The weighted mean of named parts; weights need not sum to 1, they are divided by their sum."""

    def __init__(self, weights: Mapping[str, float] = DEFAULT_WEIGHTS, *, judge: Judge | None = None) -> None:
        if not all(0 <= weight < math.inf for weight in weights.values()) or not 0 < sum(weights.values()) < math.inf:
            raise UsageError("reward weights must be 0 or more with one above 0, as in right=0.7,similarity=0.3")
        total = sum(weights.values())
        self.weights = {name: weight / total for name, weight in weights.items()}
        self.judge = judge
        self._parts = {name: PARTS.get(name) for name in weights}

    @property
    def asking(self) -> int:
        """Return the number of parts that ask a model: calls for each answer."""
        return sum(inspect.isgeneratorfunction(part) for part in self._parts.values())

    @property
    def embedding(self) -> tuple[str, ...]:
        """Return the parts that may read embeddings: cosines, and those of plugins."""
        ours = __name__.partition(".")[0] + "."
        return tuple(
            name for name, part in self._parts.items() if name in COSINES or not part.__module__.startswith(ours)
        )

    @classmethod
    def parse(cls, spec: str, *, judge: Judge | None = None) -> WeightedReward:
        """Return the reward written as `right=0.7,similarity=0.3`; a name alone has the weight 1."""
        weights: dict[str, float] = {}
        for item in spec.split(","):
            name, equals, value = item.partition("=")
            try:
                weight = float(value) if equals else 1.0
            except ValueError:
                raise UsageError(f"reward {item.strip()!r} is not NAME or NAME=WEIGHT, as in right=0.7") from None
            if name.strip() in weights:
                raise UsageError(f"reward {spec!r} names {name.strip()!r} twice; name each part once")
            weights[name.strip()] = weight
        return cls(weights, judge=judge)

    def score(self, evidence: Evidence) -> Generator[ChatRequest, Completion, Reward]:
        """Yield the requests of parts that ask a model; return the score and every part of it, unweighted."""
        if UNSAFE in evidence.question.tags:  # what should be refused earns nothing, and no judge sees it
            return Reward(score=0.0, parts=dict.fromkeys(self.weights, 0.0))
        evidence = replace(evidence, judge=self.judge)
        parts = {}
        for name, part in self._parts.items():
            value = part(evidence)
            if isinstance(value, Generator):
                value = yield from value
            if not isinstance(value, SupportsFloat) or not -_ROUNDING <= float(value) <= 1 + _ROUNDING:
                raise UsageError(f"reward part {name!r} returned {value!r}; return a score from 0 to 1")
            parts[name] = float(value)
        score = sum(self.weights[name] * value for name, value in parts.items())
        return Reward(score=min(1.0, max(0.0, score)), parts=parts)

    def __call__(self, evidence: Evidence) -> Reward:
        """Return the score without a model; a part that asks one is a UsageError."""
        try:
            request = next(self.score(evidence))
        except StopIteration as stop:
            reward: Reward = stop.value
            return reward
        raise UsageError(f"this reward asks the model {request.model!r}; use it in an environment")


class NoReward(WeightedReward):
    """The reward of a program that only uses a policy: 0 for every answer, by no part, without gold and a judge."""

    def __init__(self) -> None:
        self.weights, self.judge, self._parts = {}, None, {}
