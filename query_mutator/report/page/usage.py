"""What the policy does: operators by step and tag, and what each one gains.

Training steps arrive in the order of the file, the environments interleaved. An operator's gain is the score after the
next answer minus the score before the operator: with rewriting and asking apart, a rewrite alone changes no score.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from query_mutator.stats.intervals import mean_interval
from query_mutator.types import CONTROLS, UNDO

BLOCK_STEPS = 500  # rows that are counted together
EARLY_SHARE = 0.1  # of the steps: the policy still chooses nearly at random
FEWEST_VALUES = 5  # of an interval
MAX_BLOCKS = 60  # of the shares over training


@dataclass(kw_only=True)
class Choices:
    """Counts of the actions taken, by place in the episode and by tag."""

    by_step: dict[int, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    by_tag: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    episodes: int = 0

    def add(self, steps: Sequence[str], tags: Sequence[str] = (), *, place: int = 0) -> None:
        """Count actions in a row, the first at `place`."""
        for at, name in enumerate(steps, place):
            self.by_step[at][name] += 1
            for tag in tags:
                self.by_tag[tag][name] += 1

    @property
    def totals(self) -> Counter[str]:
        """Return how often each action was taken."""
        return sum(self.by_step.values(), Counter[str]())


@dataclass(slots=True)
class _Walk:
    """The episode of an environment so far."""

    episode: int = -1
    place: int = 0
    score: float = 0.0
    waiting: list[tuple[str, float, int]] = field(default_factory=list)  # operators without an answer since


class TrainingUsage:
    """What was chosen in training and what it gained, with a number for each gain."""

    def __init__(self) -> None:
        self.choices = Choices()
        self.steps = 0
        self._walks: dict[int, _Walk] = defaultdict(_Walk)
        self._first: dict[int, Counter[str]] = defaultdict(Counter)  # by block
        self._gains: dict[tuple[int, str], array[float]] = defaultdict(lambda: array("d"))  # by block and operator

    def add(self, row: Mapping[str, Any]) -> None:
        """Add a row of transcripts.jsonl."""
        walk, name, block = self._walks[row["env"]], str(row["operator"]), self.steps // BLOCK_STEPS
        self.steps += 1
        if row["episode"] != walk.episode:
            self._end(walk)
            walk = self._walks[row["env"]] = _Walk(episode=row["episode"])
            if row["baseline_score"] is not None and row["answer"]:  # asked; the row has its score only
                walk.score = float(row["baseline_score"])
            self.choices.episodes += 1
            self._first[block][name] += 1
        self.choices.add([name], place=walk.place)
        walk.place += 1
        if row["valid"]:
            if name not in CONTROLS:
                walk.waiting.append((name, walk.score, block))
            walk.score = float(row["score"])
            if row["answer"] or name == UNDO:
                self._end(walk)

    def _end(self, walk: _Walk) -> None:
        """Book the gain of the operators since the last answer."""
        for name, before, block in walk.waiting:
            self._gains[block, name].append(walk.score - before)
        walk.waiting.clear()

    def first_shares(self) -> dict[str, Any]:
        """Return the share of each action among the first ones of episodes, over training."""
        blocks = sorted(self._first)
        size = max(1, math.ceil(len(blocks) / MAX_BLOCKS))
        parts = [blocks[start : start + size] for start in range(0, len(blocks), size)]
        counts = [sum((self._first[block] for block in part), Counter[str]()) for part in parts]
        names = sorted({name for each in counts for name in each})
        return {
            "step": [min(self.steps, (part[-1] + 1) * BLOCK_STEPS) for part in parts],
            "shares": {name: [round(each[name] / each.total(), 4) for each in counts] for name in names},
        }

    def gains(self) -> list[dict[str, Any]]:
        """Return what each operator gains where the policy chose it, and early, where it chose nearly at random."""
        last_early = max(0, math.ceil(EARLY_SHARE * self.steps / BLOCK_STEPS) - 1)
        early: dict[str, list[float]] = defaultdict(list)
        later: dict[str, list[float]] = defaultdict(list)
        for (block, name), gains in self._gains.items():
            (early if block <= last_early else later)[name].extend(gains)
        return [
            {"operator": name, **_gain(later[name], "chosen", "gain"), **_gain(early[name], "random_n", "random")}
            for name in sorted({*early, *later})
        ]


def _gain(gains: Sequence[float], count: str, mean: str) -> dict[str, Any]:
    """Return number, mean and its t interval, NaN for so few values that it would exceed the scale."""
    interval = mean_interval(gains) if len(gains) >= FEWEST_VALUES else (math.nan, math.nan)
    return {count: len(gains), mean: fmean(gains) if gains else math.nan, f"{mean}_ci": list(interval)}
