"""Watch a judge during training: does its score rise while what the gold says does not?

Compared are the first and the last answers of a run, up to WINDOW finished episodes each, of questions with gold. A
warning is due when in two rows of metrics in a row, by Welch's 95 % intervals of late minus early: the judge's score
rises, the gold's does not, and judge minus gold rises. Then the policy may have learned to please the judge.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from query_mutator.env.task import Task
from query_mutator.runs.json_lines import read_json_lines
from query_mutator.stats.intervals import Interval, welch_interval
from query_mutator.training.judging import YARDSTICKS
from query_mutator.types import StepRecord

__all__ = ["LEAST", "WINDOW", "JudgeWatch", "watch_of"]

WINDOW = 200  # finished episodes at each end of the run
LEAST = 50  # fewer at each end say nothing


class JudgeWatch:
    """Gathers the last scores of each finished episode by the judge and by the gold (`yardstick`, another part)."""

    def __init__(self, yardstick: str, *, with_gold: Collection[str]) -> None:
        self.yardstick = yardstick
        self.unscored = 0  # steps without a verdict
        self._with_gold = frozenset(with_gold)  # ids of questions
        self._open: dict[int, tuple[int, float, float]] = {}  # env -> its episode, judge, gold
        self._pairs: list[tuple[float, float]] = []  # of finished episodes
        self._reported = 0  # of them, in a row of metrics
        self._suspicions = 0  # rows in a row
        self._has_warned = False

    def add(self, record: StepRecord) -> None:
        """Take a step."""
        self.add_row({name: getattr(record, name) for name in ("env", "episode", "question_id", "parts", "valid")}
                     | {"error": record.error and {"kind": record.error.kind}})  # fmt: skip

    def add_row(self, row: Mapping[str, Any]) -> None:
        """Take a row of transcripts.jsonl."""
        if not row["valid"]:
            self.unscored += (row.get("error") or {}).get("kind") == "unscored"
            return
        env, episode, parts = row["env"], row["episode"], row["parts"]
        if env in self._open and self._open[env][0] != episode:
            self._pairs.append(self._open.pop(env)[1:])
        if row["question_id"] in self._with_gold and {"judge", self.yardstick} <= set(parts):
            self._open[env] = (episode, parts["judge"], parts[self.yardstick])

    def row(self) -> dict[str, float]:
        """Return the metrics since the last row, and look for a judge that rises alone."""
        new, self._reported = self._pairs[self._reported :], len(self._pairs)
        judged, gold = (float(np.mean([pair[side] for pair in new])) if new else math.nan for side in (0, 1))
        rise = self.rises()
        suspicious = rise is not None and rise["judge"][0] > 0 and rise["gold"][0] <= 0 and rise["gap"][0] > 0
        self._suspicions = self._suspicions + 1 if suspicious else 0
        gap_low = math.nan if rise is None else rise["gap"][0]
        return {
            "judge/score": judged,
            "judge/gold": gold,
            "judge/unscored": self.unscored,
            "judge/gap_rise": gap_low if math.isfinite(gap_low) else math.nan,
            "judge/rises_alone": float(self._suspicions > 1),
        }

    def rises(self) -> dict[str, Interval] | None:
        """Return the 95 % intervals of late minus early, of judge, gold and their gap; None for too few episodes."""
        count = min(WINDOW, len(self._pairs) // 2)
        if count < LEAST:
            return None
        early, late = self._pairs[:count], self._pairs[-count:]
        noise = 1 / count**2  # one answer more: scores that never vary still have an interval
        read: dict[str, Callable[[tuple[float, float]], float]] = {
            "judge": lambda pair: pair[0],
            "gold": lambda pair: pair[1],
            "gap": lambda pair: pair[0] - pair[1],
        }
        return {
            name: welch_interval(list(map(of, late)), list(map(of, early)), noise=noise) for name, of in read.items()
        }

    def news(self) -> list[str]:
        """Return the warning once, when it is due."""
        rise = self.rises()
        if self._has_warned or self._suspicions < 2 or rise is None:
            return []
        self._has_warned = True
        shown = {name: f"[{low:+.2f}, {high:+.2f}]" for name, (low, high) in rise.items()}
        return [
            f"warning: the judge's score rose by {shown['judge']} while {self.yardstick} changed by {shown['gold']} "
            "(95 % intervals, first and last episodes): the policy may please the judge only; read transcripts.jsonl, "
            "and check the judge with `qm judge check`"
        ]


def watch_of(task: Task, transcripts: Path) -> JudgeWatch | None:
    """Return the watch of a run's judge with what its transcript has so far; None without a judge."""
    weights = task.reward.weights
    yardstick = next((name for name in YARDSTICKS if name in weights), None)
    if "judge" not in weights or yardstick is None:
        return None
    watch = JudgeWatch(yardstick, with_gold=[question.id for question in task.questions if question.accept])
    if transcripts.exists():
        for row in read_json_lines(transcripts):
            watch.add_row(row)
    return watch
