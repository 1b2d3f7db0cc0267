"""The section on what the policy does: operators by step, tag and verdict, and what each one gains.

Training steps arrive in the order of the file, the environments interleaved. An operator's gain is the score after the
next answer minus the score before the operator: with rewriting and asking apart, a rewrite alone changes no score.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from query_mutator.evaluation.summary import POLICY
from query_mutator.report.page.questions import Evaluation, Verdict, verdict_of
from query_mutator.stats.intervals import mean_interval
from query_mutator.types import AS_IS, ASK, CONTROLS, SUBMIT, UNDO, success_in

BLOCK_STEPS = 500  # rows that are counted together
EARLY_SHARE = 0.1  # of the steps: the policy still chooses nearly at random
FEWEST_VALUES = 5  # of an interval
MAX_POINTS = 60  # of the shares over training


@dataclass(kw_only=True)
class Choices:
    """Counts of the actions taken, by place in the episode, tag and verdict on the last answer seen."""

    by_step: Counter[tuple[int, str]] = field(default_factory=Counter)
    by_tag: Counter[tuple[str, str]] = field(default_factory=Counter)
    by_verdict: Counter[tuple[Verdict, str]] = field(default_factory=Counter)
    episodes: int = 0

    def add(self, place: int, name: str, verdict: Verdict | None, tags: Sequence[str] = ()) -> None:
        """Count an action; `verdict` is None where it is unknown."""
        self.by_step[place, name] += 1
        self.by_tag.update((tag, name) for tag in tags)
        if verdict is not None:
            self.by_verdict[verdict, name] += 1

    def data(self, operators: Sequence[str]) -> dict[str, Any]:
        """Return the counts as the page has them."""
        totals = Counter[str]()
        for (_, name), count in self.by_step.items():
            totals[name] += count
        return {
            "operators": list(operators),
            "by_step": _rows("step", self.by_step),
            "by_tag": _rows("tag", self.by_tag),
            "by_verdict": _rows("verdict", self.by_verdict),
            "undo": totals[UNDO],
            "submit": totals[SUBMIT],
            "episodes": self.episodes,
        }


def _rows(name: str, counts: Mapping[tuple[Any, str], int]) -> list[dict[str, Any]]:
    found: dict[Any, dict[str, int]] = defaultdict(dict)
    for (key, operator), count in sorted(counts.items()):
        found[key][operator] = count
    return [{name: key, "counts": each} for key, each in found.items()]


def choices_of_policy(evaluation: Evaluation, *, policy_asks: bool) -> Choices:
    """Return the choices of the greedy policy on held-out questions; `policy_asks`: asking is an action of its own."""
    found = Choices()
    for question, way in evaluation.rows_of(POLICY):
        found.episodes += not way["error"]
        for place, (name, verdict) in enumerate(
            zip(way["steps"], _seen_before(question, way, policy_asks=policy_asks), strict=True)
        ):
            found.add(place, name, verdict, question["tags"])
    return found


def _seen_before(question: Mapping[str, Any], way: Mapping[str, Any], *, policy_asks: bool) -> Iterator[Verdict | None]:
    """Yield the verdict on the last answer that the policy had seen before each step."""
    answers = dict(zip(zip(way["asked"], way["forms"], strict=True), way["verdicts"], strict=True))
    original = (question["q"], AS_IS)
    asks_apart = policy_asks or ASK in way["steps"] or original not in answers
    seen: Verdict | None = "none" if asks_apart else answers[original]
    currents = zip(way["rewrites"], way["step_forms"], strict=True)
    for name, current in zip(way["steps"], currents, strict=True):
        yield seen
        if current in answers and (name == ASK or not asks_apart):
            seen = answers[current]


@dataclass(slots=True)
class _Walk:
    """The episode of an environment so far."""

    episode: int = -1
    place: int = 0
    score: float = 0.0
    seen: Verdict | None = "none"
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
                walk.score, walk.seen = float(row["baseline_score"]), None
            self.choices.episodes += 1
            self._first[block][name] += 1
        self.choices.add(walk.place, name, walk.seen)
        walk.place += 1
        if not row["valid"]:
            return
        if name not in CONTROLS:
            walk.waiting.append((name, walk.score, block))
        walk.score = float(row["score"])
        if row["answer"]:
            walk.seen = verdict_of(row["answer"], success_in(row["parts"]) >= 0.5)
        if row["answer"] or name == UNDO:
            self._end(walk)

    def _end(self, walk: _Walk) -> None:
        """Book the gain of the operators since the last answer."""
        for name, before, block in walk.waiting:
            self._gains[block, name].append(walk.score - before)
        walk.waiting.clear()

    def first_shares(self) -> dict[str, Any]:
        """Return the share of each action among the first ones of episodes, over training."""
        size = max(1, math.ceil(len(self._first) / MAX_POINTS))
        steps, counts = [], []
        blocks = sorted(self._first)
        for start in range(0, len(blocks), size):
            part = blocks[start : start + size]
            steps.append(min(self.steps, (part[-1] + 1) * BLOCK_STEPS))
            counts.append(sum((self._first[block] for block in part), Counter[str]()))
        names = sorted({name for each in counts for name in each})
        shares = {name: [round(each[name] / each.total(), 4) for each in counts] for name in names}
        return {"step": steps, "shares": shares}

    def gains(self) -> dict[str, Any]:
        """Return what each operator gains where the policy chose it, and early, where it chose nearly at random."""
        last_early = max(0, math.ceil(EARLY_SHARE * self.steps / BLOCK_STEPS) - 1)
        early: dict[str, list[float]] = defaultdict(list)
        later: dict[str, list[float]] = defaultdict(list)
        for (block, name), gains in self._gains.items():
            (early if block <= last_early else later)[name].extend(gains)
        rows = [
            {"operator": name, **_gain(later[name], "chosen", "gain"), **_gain(early[name], "random_n", "random")}
            for name in sorted({*early, *later})
        ]
        note = (
            "score after the next answer minus score before, which is 0 until there is an answer; "
            f"at random: the first {EARLY_SHARE:.0%} of the training steps"
        )
        return {"gains": rows, "gains_note": note}


def _gain(gains: Sequence[float], count: str, mean: str) -> dict[str, Any]:
    """Return number, mean and its t interval, NaN for so few values that it would exceed the scale."""
    interval = mean_interval(gains) if len(gains) >= FEWEST_VALUES else (math.nan, math.nan)
    return {count: len(gains), mean: fmean(gains) if gains else math.nan, f"{mean}_ci": list(interval)}
