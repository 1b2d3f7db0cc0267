"""`qm init` and `qm check`: begin a project, and show how the answers of its questions are graded."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from query_mutator.bounds import group_of
from query_mutator.cli.console import note, table
from query_mutator.cli.flags import PROJECT, Positional
from query_mutator.errors import DatasetError, UsageError
from query_mutator.files import write_text
from query_mutator.plan.table import is_right
from query_mutator.reading import kind_of_gold
from query_mutator.reading.text import UNSPACED
from query_mutator.session.task import make_reward, read_dataset
from query_mutator.settings import Columns, Plugins, Reward, TaskSettings
from query_mutator.types import Question

#: What a new project gets, and what each file is for.
FILES = {PROJECT: "settings of the commands that start here", "questions.jsonl": "ten example questions"}


@dataclass(frozen=True, kw_only=True)
class InitFlags:
    """Write qm.toml (settings) and questions.jsonl (example questions) for a new project; overwrite nothing."""

    folder: Positional[str] = "."
    """Folder of the project; created if missing."""


def init(flags: InitFlags) -> None:
    """Write the files and print what to do next."""
    folder = Path(flags.folder)
    there = [name for name in FILES if os.path.lexists(folder / name)]
    if there:
        raise UsageError(f"{folder / there[0]} exists and is not replaced; move it away, or name another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder}: {error.strerror}; name a folder that can be written") from None
    templates = resources.files("query_mutator.data") / "project"
    for name, purpose in FILES.items():
        write_text(folder / name, (templates / name).read_text(encoding="utf-8"))
        print(f"wrote {folder / name}: {purpose}")
    change = "" if folder.resolve() == Path.cwd() else f"cd {flags.folder} && "
    print(f"next: {change}qm train, which needs no model server; or name your model in {PROJECT} and run qm doctor")


# --- qm check --------------------------------------------------------------------------------------------------------


LABELS = {"yes": "no", "no": "yes", "true": "false", "false": "true"}
_NUMBER = re.compile(r"[-+]?\d+(\.\d+)?")


@dataclass(frozen=True, kw_only=True)
class CheckFlags(Columns, Reward, Plugins):
    """Show how right and wrong answers of each kind in a file of questions are graded; makes no model call."""

    file: Positional[str]
    """File of questions; rows that cannot be read are listed by line."""


def check(flags: CheckFlags) -> None:
    """Print a row for each kind, with an example, and answers that are graded otherwise than they should be."""
    settings = group_of(TaskSettings, flags, dataset=flags.file)
    kinds: dict[str, list[Question]] = {}
    for question in _read(settings):
        kinds.setdefault(kind_of(question), []).append(question)
    reward, rows, surprises = make_reward(settings), [], list[str]()
    for kind, found in kinds.items():
        counts, examples = [], []
        for right, word in ((True, "wrong"), (False, "right")):
            tried = [(one, answer) for one in found for answer in answers_of(one, found, right=right)]
            missed = [(one, said) for one, said in tried if is_right(said, one, reward, where=flags.file) != right]
            counts.append(f"{len(tried) - len(missed)} of {len(tried)}")
            examples.append(tried[0][1] if tried else "")
            surprises += [f"graded {word}: {said!r} to {one.text[:40]!r}" for one, said in missed[:5]]
        rows.append((kind, str(len(found)), *counts, *examples))
    header = ("answers", "questions", "right: graded right", "wrong: graded wrong", "a right one", "a wrong one")
    print(table(flags.file, header, rows), *surprises, sep="\n")


def _read(settings: TaskSettings) -> Sequence[Question]:
    """Return the questions of the file; print the rows that cannot be read where there are several."""
    try:
        return read_dataset(settings).questions
    except DatasetError as error:
        if error.count < 2:
            raise
        note(*error.rows, *([f"and {left} more"] if (left := error.count - len(error.rows)) else []))
        raise UsageError(f"{settings.dataset}: {error.count} rows cannot be read; correct them") from None


def kind_of(question: Question) -> str:
    """Return the kind of answer that a question accepts, as graders read it."""
    if not question.accept:
        return "none in `accept`: never right"
    first = question.accept[0]
    kind = kind_of_gold(first, question.text)
    if kind != "text":
        return "yes or no" if kind == "verdict" else kind
    if UNSPACED.search(first):
        return "script without spaces"
    return "one word" if len(first.split()) == 1 else "several words"


def answers_of(question: Question, others: Sequence[Question], *, right: bool) -> list[str]:
    """Return right answers; or wrong ones: another number, the other label, what another question accepts."""
    own = question.accept[0] if question.accept else ""
    if right or not own:
        return [f"The answer is {own}.", own] if own else []
    if _NUMBER.fullmatch(own):
        return [f"The answer is {float(own) + 1:g}."]
    if other := LABELS.get(own.lower()):
        return [f"It may be {own} or {other}.", f"The answer is {other}."]
    accepted = {text.lower() for text in question.accept}
    return [f"The answer is {one.accept[0]}." for one in others if one.accept[0].lower() not in accepted][:1]
