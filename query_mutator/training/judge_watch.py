"""Watch a judge during training: does its score rise while what the gold says does not?

Compared are the first and the last answers of a run, up to WINDOW finished episodes each, of questions with gold. A
warning is due when in two rows of metrics in a row, by Welch's 95 % intervals of late minus early: the judge's score
rises, the gold's does not, and judge minus gold rises. Then the policy may have learned to please the judge.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from query_mutator.cli.console import note
from query_mutator.env.steps import Steps
from query_mutator.files.json_lines import read_json_lines
from query_mutator.session.judging import REFERENCE_METRICS
from query_mutator.stats.intervals import Interval, welch_interval
from query_mutator.training.callbacks import Callback, RunView
from query_mutator.training.parts import RunParts
from query_mutator.types import StepRecord

__all__ = ["LEAST", "WINDOW", "JudgeWatch"]

WINDOW = 200  # finished episodes at each end of the run
LEAST = 50  # fewer at each end say nothing


class JudgeWatch(Callback):
    """Gathers the last scores of each finished episode by the judge and by the gold (another part of the reward)."""

    def __init__(self, reference_metric: str, *, with_gold: Collection[str]) -> None:
        self.reference_metric = reference_metric
        self.unscored = 0  # steps without a verdict
        self._with_gold = frozenset(with_gold)  # ids of questions
        self._open: dict[int, tuple[int, float, float]] = {}  # env -> its episode, judge, gold
        self._pairs: list[tuple[float, float]] = []  # of finished episodes
        self._reported = 0  # of them, in a row of metrics
        self._suspicions = 0  # rows in a row
        self._has_warned = False

    @classmethod
    def of(cls, parts: RunParts) -> Callback:
        """Return the watch of a run's judge with what its transcript has so far; without a judge, one of nothing."""
        weights = parts.task.reward.weights
        reference_metric = next((name for name in REFERENCE_METRICS if name in weights), None)
        if "judge" not in weights or reference_metric is None:
            return Callback()
        watch = cls(reference_metric, with_gold=[question.id for question in parts.task.questions if question.accept])
        transcripts = parts.run_dir.path / "transcripts.jsonl"
        for row in read_json_lines(transcripts) if transcripts.exists() else ():
            watch.add_row(row)
        watch._reported = len(watch._pairs)
        return watch

    def on_step(self, run: RunView, steps: Steps, records: Sequence[StepRecord]) -> None:
        """Take the records of finished steps."""
        for record in records:
            self.add(record)

    def on_log(self, run: RunView) -> None:
        """Add the metrics to the row, and print the warning when it is due."""
        run.row |= self.row()
        note(*self.new_warnings())

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
        if row["question_id"] in self._with_gold and {"judge", self.reference_metric} <= set(parts):
            self._open[env] = (episode, parts["judge"], parts[self.reference_metric])

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

    def new_warnings(self) -> list[str]:
        """Return the warning once, when it is due."""
        rise = self.rises()
        if self._has_warned or self._suspicions < 2 or rise is None:
            return []
        self._has_warned = True
        shown = {name: f"[{low:+.2f}, {high:+.2f}]" for name, (low, high) in rise.items()}
        return [
            f"warning: the judge's score rose by {shown['judge']} while {self.reference_metric} changed by "
            f"{shown['gold']} (95 % intervals, first and last episodes): the policy may please the judge only; "
            "read transcripts.jsonl, and check the judge with `qm judge check`"
        ]
