"""`qm data export`: what a run found out, as rows to train on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import arg

from query_mutator import operators
from query_mutator.cli.common import JsonFlags, show
from query_mutator.cli.console import progress
from query_mutator.errors import UsageError
from query_mutator.files import atomic_write, read_json_lines
from query_mutator.rewards.weighted import WeightedReward
from query_mutator.sft.distill import ExportRules, choose

if TYPE_CHECKING:
    from query_mutator.rewards.weighted import WeightedReward
    from query_mutator.sft.distill import ExportRules


@dataclass(frozen=True, kw_only=True)
class ExportFlags(JsonFlags):
    """Write the rewrites that got better answers as instruction and response rows."""

    run: str = "runs/latest"
    """Run folder, or a transcripts.jsonl."""
    output: Annotated[str, arg(aliases=["-o"])]
    """JSONL file to write: question, the rewrite that won, its score and how it was made."""
    min_gain: float = 0.0
    """A rewrite counts when its answer scored this much more than the answer to the question as it stood."""
    only_right: bool = False
    """Take only rewrites whose answer was right."""
    every: bool = False
    """Write all rewrites that gained, not only the best of each question."""
    simplest: bool = False
    """Of a question's rewrites take the one made by the fewest operators, right ones first, not the best score."""
    without: str = ""
    """Leave out rewrites made with these operators, as a,b,c: those that look up what no small model can know."""
    keep_unchanged: bool = False
    """Add questions that were right as they stood and that no rewrite improved, with themselves as the rewrite."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.min_gain < 1.0:
            raise ValueError(f"--min-gain {self.min_gain} must lie from 0 to below 1")
        if self.every and self.simplest:
            raise ValueError("--every takes all rewrites, --simplest one of a question; give one of the two")

    @property
    def rules(self) -> ExportRules:
        """Which rewrites become rows; an operator that does not exist is a UsageError."""
        without = tuple(name.strip() for name in self.without.split(",") if name.strip())
        if unknown := sorted(set(without) - set(operators.names())):
            known = ", ".join(operators.names())
            raise UsageError(f"--without: no operator {', '.join(unknown)}; there are {known}")
        return ExportRules(
            min_gain=self.min_gain,
            only_right=self.only_right,
            every=self.every,
            simplest=self.simplest,
            without=without,
            keep_unchanged=self.keep_unchanged,
        )


def export(flags: ExportFlags) -> None:
    """Write the rows of a run and say how many there are."""
    rules, steps = flags.rules, _steps(flags.run)
    with progress("reading", len(steps), unit="step") as bar:
        choice = choose(_counted(steps, bar), _reward(flags.run), rules)
    if not choice.rewrites:
        raise UsageError(f"{flags.run}: no rewrite in it got a better answer; train longer, or lower --min-gain")
    rows = _with_ids([one.to_row() for one in choice.rewrites])
    with atomic_write(flags.output) as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
    counts = {"steps": choice.steps, "invalid_steps": choice.invalid_steps, "questions": choice.questions}
    report = {"output": flags.output, "rows": len(rows), "right": sum(row["success"] for row in rows), **counts}
    text = f"{flags.output}: {len(rows)} rows ({report['right']} right) from {choice.steps} steps on "
    text += f"{choice.questions} questions with {choice.different} different texts"
    show(flags, report, text)


def _steps(run: str) -> list[dict[str, Any]]:

    path = Path(run) / "transcripts.jsonl" if Path(run).is_dir() else Path(run)
    if not path.is_file():
        raise UsageError(f"{path}: no such file; give a run folder such as runs/latest, or a transcripts.jsonl")
    steps = list(read_json_lines(path))
    needed = {"env", "episode", "question_id", "question", "operator", "rewrite", "parts", "baseline_score", "valid"}
    for number, step in enumerate(steps, start=1):
        if not isinstance(step, dict) or not needed <= step.keys():
            missing = ", ".join(sorted(needed - set(step)))
            raise UsageError(f"{path}:{number}: not a step of a run, it lacks {missing}")
    return steps


def _reward(run: str) -> WeightedReward:
    """Return the reward the run was made with, from its config.json; the documented one where there is none."""
    config = (Path(run) if Path(run).is_dir() else Path(run).parent) / "config.json"
    try:
        spec = json.loads(config.read_text(encoding="utf-8"))["flags"]["reward"]
    except (OSError, ValueError, KeyError):
        spec = ""
    return WeightedReward.parse(spec) if spec else WeightedReward()


def _counted(steps: list[dict[str, Any]], bar: Any) -> Iterator[Mapping[str, Any]]:
    for step in steps:
        bar.update()
        yield step


def _with_ids(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows with ids of their own: further rows of a question are `ID#2`, `ID#3`."""
    seen: dict[str, int] = {}
    for row in rows:
        seen[row["id"]] = count = seen.get(row["id"], 0) + 1
        if count > 1:
            row["id"] = f"{row['id']}#{count}"
    return rows
