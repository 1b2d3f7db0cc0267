"""The policy's actions: operators by step and tag, and the gain of each.

An operator's gain is the score after the next answer minus the score before the operator: with rewriting and asking
apart, a rewrite alone changes no score.
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

FEWEST_VALUES = 5  # of an interval


@dataclass(kw_only=True)
class Choices:
    """Counts of the actions taken, by place in the episode and by tag."""

    by_step: dict[int, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    by_tag: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    episodes: int = 0

    def add(self, steps: Sequence[str], tags: Sequence[str] = ()) -> None:
        """Count the actions of an episode."""
        for at, name in enumerate(steps):
            self.by_step[at][name] += 1
            for tag in tags:
                self.by_tag[tag][name] += 1

    @property
    def totals(self) -> Counter[str]:
        """Return how often each action was taken."""
        return sum(self.by_step.values(), Counter[str]())


class TrainingUsage:
    """Actions chosen in training and their gains, with the number of each."""

    def __init__(self) -> None:
        self.choices = Choices()
        self._gains: dict[str, array[float]] = defaultdict(lambda: array("d"))  # by operator

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add the rows of an episode in transcripts.jsonl."""
        before, is_asked = rows[0]["baseline_score"], rows[0]["answer"]
        score = float(before) if before is not None and is_asked else 0.0  # not asked: the row has its score only
        waiting: list[tuple[str, float]] = []  # operators without an answer since, and the score before
        self.choices.add([str(row["operator"]) for row in rows])
        self.choices.episodes += 1
        for row in rows:
            name = str(row["operator"])
            if row["valid"]:
                if name not in CONTROLS:
                    waiting.append((name, score))
                score = float(row["score"])
            if row is rows[-1] or (row["valid"] and (row["answer"] or name == UNDO)):
                for operator, score_before in waiting:
                    self._gains[operator].append(score - score_before)
                waiting.clear()

    def gains(self) -> list[dict[str, Any]]:
        """Return what each operator gains: number, mean and its t interval, NaN for too few values."""
        found = []
        for name, gains in sorted(self._gains.items()):
            interval = mean_interval(gains) if len(gains) >= FEWEST_VALUES else (math.nan, math.nan)
            found.append({"operator": name, "chosen": len(gains), "gain": fmean(gains), "gain_ci": list(interval)})
        return found
