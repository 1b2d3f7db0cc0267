"""`qm data export`: the best rewrites of a run, as rows to train on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from tyro.conf import arg

from query_mutator.cli.common import JsonFlags, show
from query_mutator.cli.outputs import Output, holding
from query_mutator.errors import UsageError
from query_mutator.files import atomic_write, encode
from query_mutator.settings.output import Plugins
from query_mutator.training.export import ExportRules, choose, read_steps, reward_of, training_rows

__all__ = ["ExportFlags", "export"]


@dataclass(frozen=True, kw_only=True)
class ExportFlags(ExportRules, Plugins, JsonFlags):
    """Write the rewrites that got better answers as instruction and response rows."""

    run: str = "runs/latest"
    """Run folder, or a transcripts.jsonl."""
    output: Annotated[str, arg(name="out", aliases=["--output", "-o"]), Output(holding(b'"baseline_score":'))]
    """JSONL file to write: question, the rewrite that won, its score and how it was made."""


def export(flags: ExportFlags) -> None:
    """Write the rows of a run and print how many there are."""
    choice = choose(read_steps(flags.run), reward_of(flags.run, flags.plugin), flags)
    if not choice.rewrites:
        raise UsageError(f"{flags.run}: no rewrite in it got a better answer; train longer, or lower --min-gain")
    rows = list(training_rows(choice.rewrites))
    with atomic_write(flags.output) as file:
        file.writelines(encode(row) + b"\n" for row in rows)
    counts = {"steps": choice.steps, "invalid_steps": choice.invalid_steps, "questions": choice.questions}
    report = {"output": flags.output, "rows": len(rows), "right": sum(row["success"] for row in rows), **counts}
    text = f"{flags.output}: {len(rows)} rows ({report['right']} right) from {choice.steps} steps on "
    text += f"{choice.questions} questions with {choice.different} different texts"
    show(flags, report, text)
