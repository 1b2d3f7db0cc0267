"""From a run's transcripts to training rows: question -> the rewrite that won."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from query_mutator.rewards.weighted import WeightedReward

UNDO = "undo"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewrite:
    """One rewrite of a question and what the answer to it was worth."""

    question_id: str
    question: str
    text: str
    score: float
    baseline_score: float
    right: bool
    operators: tuple[str, ...]

    @property
    def gain(self) -> float:
        """Return how much better its answer was than the answer to the question as it stood."""
        return round(self.score - self.baseline_score, 6)  # the last bits are no gain

    def to_row(self) -> dict[str, Any]:
        """Return the training row: `instruction` is the question, `response` the rewrite, the rest is metadata."""
        return {
            "id": self.question_id,
            "instruction": self.question,
            "response": self.text,
            "score": round(self.score, 6),
            "baseline_score": round(self.baseline_score, 6),
            "success": self.right,
            "operators": list(self.operators),
        }


class Choice(NamedTuple):
    """Rows chosen, and of how many steps, questions and different rewrites."""

    rewrites: list[Rewrite]
    steps: int
    invalid_steps: int
    questions: int
    different: int


def read_rewrites(steps: Iterable[Mapping[str, Any]], reward: WeightedReward) -> Iterator[Rewrite | None]:
    """Yield what stood after each step of a transcript, None for a step whose call failed."""
    done: dict[tuple[int, int], list[str]] = {}  # operators applied so far in each episode
    for step in steps:
        episode = (int(step["env"]), int(step["episode"]))
        operators = done.setdefault(episode, [])
        if not step["valid"]:
            yield None
            continue
        if step["operator"] == UNDO:
            operators.clear()
        elif step["rewrite"] != step["question"]:
            operators.append(str(step["operator"]))
        yield _rewrite(step, reward, tuple(name for name in operators if name != "submit"))


def _rewrite(step: Mapping[str, Any], reward: WeightedReward, operators: tuple[str, ...]) -> Rewrite:
    parts = step["parts"]
    score = sum(weight * float(parts.get(name, 0.0)) for name, weight in reward.weights.items())
    return Rewrite(
        question_id=str(step["question_id"]),
        question=str(step["question"]),
        text=str(step["rewrite"]),
        score=min(1.0, max(0.0, score)),
        baseline_score=float(step["baseline_score"]),
        right=float(parts.get("right", 0.0)) >= 0.5,
        operators=operators,
    )


@dataclass(frozen=True, kw_only=True)
class ExportRules:
    """Which rewrites of a question become rows; see the flags of `qm data export`."""

    min_gain: float = 0.0
    only_right: bool = False
    every: bool = False
    simplest: bool = False
    without: Collection[str] = ()
    keep_unchanged: bool = False

    def winners(self, rewrites: Mapping[str, Rewrite]) -> list[Rewrite]:
        """Return the rows of one question from all its texts."""
        gained = sorted((one for one in rewrites.values() if self._counts(one)), key=self._rank)
        if gained:
            return gained if self.every else gained[:1]
        unchanged = next((one for text, one in rewrites.items() if text == one.question and one.right), None)
        return [unchanged] if self.keep_unchanged and unchanged else []

    def _counts(self, one: Rewrite) -> bool:
        if one.text == one.question or one.gain <= self.min_gain or (self.only_right and not one.right):
            return False
        return not set(self.without) & set(one.operators)

    def _rank(self, one: Rewrite) -> tuple[bool, int, float, int, str]:
        """Return what puts the winner first: its score, then the shorter text; with `simplest` its operators before."""
        first = (not one.right, len(one.operators)) if self.simplest else (False, 0)
        return (*first, -one.score, len(one.text), one.text)


def choose(steps: Iterable[Mapping[str, Any]], reward: WeightedReward, rules: ExportRules) -> Choice:
    """Return the rewrites of each question that win by the rules."""
    found: dict[str, dict[str, Rewrite]] = {}  # question -> rewrite -> how it went
    counts = {"steps": 0, "invalid": 0}
    for one in read_rewrites(steps, reward):
        counts["steps"] += 1
        counts["invalid"] += one is None
        if one is not None:
            found.setdefault(one.question, {}).setdefault(one.text, one)
    chosen = [winner for rewrites in found.values() for winner in rules.winners(rewrites)]
    different = sum(len(rewrites) for rewrites in found.values())
    return Choice(chosen, counts["steps"], counts["invalid"], len(found), different)
