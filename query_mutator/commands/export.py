"""What a run leaves for others: its best rewrites as training rows, its replies as a log, its policy in one file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from ppo.fields import Ge
from query_mutator.bounds import Cosine
from query_mutator.cli.flags import Positional
from query_mutator.cli.outputs import JsonFlags, Output, OutputFlags, holding, show
from query_mutator.errors import UsageError
from query_mutator.files import atomic_write, encode
from query_mutator.session.policy_file import read_policy, write_policy_file
from query_mutator.settings import Plugins
from query_mutator.training.export import read_steps, reply_rows, reward_of, rewrites_in, winner


@dataclass(frozen=True, kw_only=True)
class ExportFlags(Plugins, JsonFlags):
    """Write, for each question, the rewrite with the best answer as a row of instruction and response."""

    run: str = "runs/latest"
    """Run folder, or a transcripts.jsonl."""
    min_gain: Annotated[Cosine, Ge(0)] = 0.0
    """Minimum gain in score over the answer to the original question."""
    only_right: bool = False
    """Only take rewrites whose answer was right."""
    output: Annotated[str, Parameter(name=("--out", "--output", "-o")), Output(holding(b'"baseline_score":'))]
    """JSONL file to write: question, best rewrite, its score and operators."""


def export(flags: ExportFlags) -> None:
    """Write the rows of a run and print how many there are."""
    steps = read_steps(flags.run)
    found = rewrites_in(steps, reward_of(flags.run, flags.plugin))
    best = [winner(rewrites, min_gain=flags.min_gain, only_right=flags.only_right) for rewrites in found.values()]
    rows = [row for row in best if row is not None]
    if not rows:
        raise UsageError(f"{flags.run}: no rewrite in it got a better answer; train longer, or lower --min-gain")
    with atomic_write(flags.output) as file:
        file.writelines(encode(row) + b"\n" for row in rows)
    right, invalid = sum(row["success"] for row in rows), sum(not step["valid"] for step in steps)
    counts = {"steps": len(steps), "invalid_steps": invalid, "questions": len(found)}
    report = {"output": flags.output, "rows": len(rows), "right": right, **counts}
    text = f"{flags.output}: {len(rows)} rows ({right} right) from {len(steps)} steps on {len(found)} questions with "
    text += f"{sum(map(len, found.values()))} different texts"
    show(flags, report, text)


@dataclass(frozen=True, kw_only=True)
class ExportRepliesFlags(Plugins, JsonFlags):
    """Write the replies of a run as graded JSON lines for `qm plan --from-logs`."""

    run: Positional[str] = "runs/latest"
    """Run folder."""
    dataset: str | None = None
    """Data file of the run, if it is not in the current folder."""
    output: Annotated[str, Parameter(name=("--out", "--output", "-o")), Output(holding(b'"label":'))]
    """JSONL file to write: question, form, reply, whether it is right."""


def export_replies(flags: ExportRepliesFlags) -> None:
    """Write the rows and print how many there are."""
    given = {} if flags.dataset is None else {"dataset": flags.dataset}
    rows = list(reply_rows(flags.run, given=given, plugins=flags.plugin))
    if not rows:
        raise UsageError(
            f"{flags.run}: none of its replies is to a training question as it stands, in a form without examples; "
            "recorded replies are not kept again"
        )
    with atomic_write(flags.output) as file:
        file.writelines(encode(row) + b"\n" for row in rows)
    questions, right = len({row["question"] for row in rows}), sum(row["label"] for row in rows)
    report = {"output": flags.output, "rows": len(rows), "questions": questions, "right": right}
    show(flags, report, f"{flags.output}: {len(rows)} replies to {questions} questions, {right} right")


@dataclass(frozen=True, kw_only=True)
class ExportPolicyFlags(OutputFlags):
    """Write a trained policy to one file with all that inference needs, without reference answers or pickled code.

    `qm rewrite` and `Rewriter.load` take the file in place of a run folder. It holds the texts of the training
    questions, because some operators merge in the most similar one, and an accepted answer of
    each where a form shows them.
    """

    run: Positional[str] = "runs/latest"
    """A run folder."""
    output: Annotated[str, Parameter(name=("--out", "--output", "-o")), Output(holding(b'{"__metadata__":{"policy":'))]
    """File to write, as policy.qm."""


def export_policy(flags: ExportPolicyFlags) -> None:
    """Write the file and print what is in it."""
    saved = read_policy(flags.run, best=True)
    write_policy_file(flags.output, saved.redacted())
    size_kb = Path(flags.output).stat().st_size / 1000
    shown = ", with the accepted answers that its examples show" if saved.shows_examples else ""
    print(
        f"{flags.output}: {saved.flags.algo} after {saved.env_steps} steps, {len(saved.actions)} "
        f"actions, {len(saved.train)} training questions, {size_kb:,.0f} kB{shown}"
    )
