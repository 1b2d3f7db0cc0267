"""Question sets: the bundled ones, question files, and the split.

`load_questions` reads .jsonl, .json, .csv and .parquet, also in known layouts (SQuAD, TriviaQA, GSM8K, XSTest), whose
rows may be dropped, which is reported with the reason; a bad row of any other file is an error with file and line.
`load_question_set` returns in addition the requests that should be refused, apart from the questions. The sets in
`BUNDLED` and `guard_questions` come with the product.

`split_questions` never moves a question: it hashes what a question is about, so no target is in two parts:

    test          38 % of the targets, read by evaluation commands and at the end of a run only
    train         the others, in five folds
    validation    one fold of them, left out of training: curves and every choice between settings use it
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

from query_mutator.cli.console import note
from query_mutator.data.readers import (
    COLUMNS,
    Layout,
    fields_in,
    gold_in,
    is_number,
    layout_of,
    read_rows,
    shown,
    tags_in,
    text_in,
    turns_in,
)
from query_mutator.errors import DatasetError
from query_mutator.registry import nearest
from query_mutator.settings import ValidationFold
from query_mutator.types import UNSAFE, Message, Question

__all__ = [
    "BUNDLED", "FOLDS", "QuestionSet", "Split", "fold_of", "general", "guard_questions", "in_test",
    "load_question_set", "load_questions", "split_questions", "target_key",
]  # fmt: skip

TEST_PERCENT = 38
FOLDS = 5
_CLOSED = {"yes", "no", "true", "false"}  # answers that many questions have
_LETTER = re.compile(r"\(?[A-Za-z][).]?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """The questions to learn from, those to choose by, and the held-out ones."""

    train: tuple[Question, ...]
    test: tuple[Question, ...] = ()
    validation: tuple[Question, ...] = ()
    guard: tuple[Question, ...] = ()  # that should be refused: asked for the guard metric, never learned from
    source: Mapping[str, Any] = field(default_factory=dict)  # what was downloaded, with digests

    @property
    def sha256(self) -> str:
        """Return the digest of all questions with their gold, whatever their order and the file they are from."""
        rows = sorted(
            (q.id, q.text, list(q.accept), q.reference or "", [*q.tags, *filter(None, [q.about])], *map(str, q.context))
            for q in self.train + self.test + self.validation
        )
        found = hashlib.sha256()
        for row in rows:
            found.update(json.dumps(row).encode())
        return found.hexdigest()


def target_key(question: Question) -> str:
    """Return what the question is about: where it does not say, its first accepted name, else its own text.

    A question that is answered by yes or no, or by the letter of a choice, is about itself.
    """
    name = question.accept[0] if question.accept else question.text
    return question.about or (question.text if name.casefold() in _CLOSED or _LETTER.fullmatch(name) else name)


def in_test(question: Question) -> bool:
    """Return whether a question is held out: sha256 of its target modulo 100, so adding rows moves no other row."""
    return int(_digest(question)[:8], 16) % 100 >= 100 - TEST_PERCENT


def fold_of(question: Question) -> int:
    """Return the fold of a training question, 0 to 4, by other digits of the same hash than `in_test` reads."""
    return int(_digest(question)[8:16], 16) % FOLDS


def split_questions(questions: Iterable[Question], fold: ValidationFold = "none") -> Split:
    """Return the hash-stable split, with one fold of the training questions as validation; order is kept."""
    parts: dict[str, list[Question]] = {"train": [], "test": [], "validation": []}
    for question in questions:
        part = "test" if in_test(question) else "validation" if fold_of(question) == fold else "train"
        parts[part].append(question)
    return Split(train=tuple(parts["train"]), test=tuple(parts["test"]), validation=tuple(parts["validation"]))


def _digest(question: Question) -> str:
    return hashlib.sha256(target_key(question).encode()).hexdigest()


# --- question files --------------------------------------------------------------------------------------------------

_PEEKED_ROWS = 20  # read to recognize the layout
_SHOWN_REASONS = 3  # why rows are dropped
_SHOWN_ROWS = 10  # that are invalid
QUESTION_COLUMNS = ("query", "question", "prompt", "text")
TURNS = "messages"  # before the question; without a column of it, the last user message is the question
ANSWER_COLUMNS = ("accept", "answer", "reference", "response")

FOLDER = Path(str(resources.files("query_mutator"))) / "data" / "questions"
GENERAL_2 = FOLDER / "general_2.jsonl"  # of a second author, about other things; for evaluation only


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionSet:
    """Questions to learn from or to ask, and requests that should be refused, which serve the guard metric only."""

    questions: list[Question]
    guard: tuple[Question, ...] = ()
    source: Mapping[str, Any] = field(default_factory=dict)  # what was downloaded, with digests


def load_questions(
    path: str | Path, *, question_column: str | None = None, answer_column: str | None = None
) -> list[Question]:
    """Return the questions of a `.jsonl`, `.json`, `.csv` or `.parquet` file, without those that should be refused.

    Without a column name a known layout is recognized by its columns (`data.readers`); else the first of `query,
    question, prompt, text` is the question and the first of `accept, answer, reference, response` the gold: a list
    holds names that count as right, a text is one good answer. A bad row is a DatasetError `file:line: ...`, whose
    `rows` has the messages of the others too.
    """
    return load_question_set([Path(path)], question_column=question_column, answer_column=answer_column).questions


def load_question_set(
    paths: Sequence[Path], *, name: str = "", question_column: str | None = None, answer_column: str | None = None
) -> QuestionSet:
    """Return the questions of files that belong together, and apart from them those with the tag `unsafe`.

    `name` is shown in place of the files.
    """
    name = name or str(paths[0])
    asked = {column for column in (question_column, answer_column) if column is not None}
    columns = {*QUESTION_COLUMNS, *ANSWER_COLUMNS, TURNS, "id", "tags", "about"} | asked | (set() if asked else COLUMNS)
    rows = (((path, line), row) for path in paths for line, row in read_rows(path, columns=columns))
    first = list(itertools.islice(rows, _PEEKED_ROWS))
    layout = None if asked else layout_of([row for _, row in first if isinstance(row, dict)], where=name)
    questions: list[Question] = []
    seen: dict[str, int] = {}  # id -> line
    dropped: Counter[str] = Counter()
    faults: list[str] = []
    for (path, line), row in itertools.chain(first, rows):
        try:
            fields = fields_in(row)
            if layout is not None:
                converted = layout.convert(fields)
                if isinstance(converted, str) or not converted["query"]:
                    dropped[converted if isinstance(converted, str) else "without a question"] += 1
                    continue
                fields = converted
            question = _question(fields, f"{path}:{line}", len(questions), question_column, answer_column)
            if question.id in seen:
                before = f"line {seen[question.id]}; give each row another id"
                raise DatasetError(f"{name}:{line}: id {question.id!r} is already in {before}")
        except DatasetError as error:
            faults.append(str(error))
            continue
        seen[question.id] = line
        questions.append(question)
    if faults:
        raise DatasetError(faults[0], rows=faults[:_SHOWN_ROWS], count=len(faults))
    if dropped and not questions:
        raise DatasetError(f"{name}: all {dropped.total()} rows are dropped: {_reasons(dropped)}")
    if not questions:
        raise DatasetError(f"{name}: no questions in it; each row needs a question column such as `query`")
    # Apart from the questions: no other code sees the two together.
    guard = tuple(question for question in questions if UNSAFE in question.tags)
    found = QuestionSet(questions=[q for q in questions if UNSAFE not in q.tags] if guard else questions, guard=guard)
    if layout is not None:
        note(_what_was_read(name, layout, found, dropped))
    return found


def _reasons(dropped: Counter[str]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in dropped.most_common(_SHOWN_REASONS))


def _what_was_read(name: str, layout: Layout, found: QuestionSet, dropped: Counter[str]) -> str:
    parts = [f"{len(found.questions)} question{'s' * (len(found.questions) != 1)}"]
    if found.guard:
        parts.append(f"marked unsafe, for the guard metric only: {len(found.guard)}")
    if dropped:
        parts.append(f"rows dropped: {_reasons(dropped)}")
    return f"{name}: read as {layout.name}; {'; '.join([*parts, *filter(None, [layout.remark])])}"


def _question(
    row: dict[str, Any], where: str, index: int, question_column: str | None, answer_column: str | None
) -> Question:
    row, context = _with_turns(row, where, question_column)
    column = _column(row, question_column, QUESTION_COLUMNS, where, "question") or ""
    accept, reference = _gold(row, where, answer_column)
    about, identity = row.get("about"), row.get("id")
    if not (identity is None or isinstance(identity, str) or is_number(identity)):
        raise DatasetError(f"{where}: `id` must be a text or a number, not {shown(identity)}")
    return Question(
        id=str(index) if identity in (None, "") else str(identity),
        text=text_in(row[column], column, where),
        accept=accept,
        reference=reference,
        tags=tags_in(row, where),
        about=None if about is None else text_in(about, "about", where),
        context=context,
    )


def _with_turns(
    row: dict[str, Any], where: str, question_column: str | None
) -> tuple[dict[str, Any], tuple[Message, ...]]:
    """Return a row that has its question, and the messages before it.

    Without a column of the question it is the last message of the user; an answer after it is the reference.
    """
    if row.get(TURNS) is None:
        return row, ()
    turns = turns_in(row[TURNS], where)
    if question_column is not None or any(name in row for name in QUESTION_COLUMNS):
        return row, turns
    if turns[-1].role == "assistant":
        row = {"reference": turns[-1].content, **row}
        turns = turns[:-1]
    if not turns or turns[-1].role != "user":
        raise DatasetError(f"{where}: `messages` must end with the user's question, or with an answer to it")
    return {QUESTION_COLUMNS[0]: turns[-1].content, **row}, turns[:-1]


def _gold(row: dict[str, Any], where: str, answer_column: str | None) -> tuple[tuple[str, ...], str | None]:
    """Return accepted names and reference. One text is a reference too."""
    column = _column(row, answer_column, ANSWER_COLUMNS, where, "answer", required=False) or ""
    value, reference = row.get(column), text_in(row.get("reference") or "", "reference", where, may_be_empty=True)
    if isinstance(value, (str, bool)):  # empty in CSV
        value = str(value).strip() or None
    accept = gold_in(value, column, where)
    if isinstance(value, str):
        reference, accept = reference or value, () if column == "reference" else accept
    return accept, reference or None


def _column(
    row: dict[str, Any], asked: str | None, usual: tuple[str, ...], where: str, what: str, *, required: bool = True
) -> str | None:
    if asked is not None:
        if asked not in row:
            near = nearest(asked, row)
            hint = f"; did you mean {near!r}?" if near else ""
            raise DatasetError(f"{where}: no column {asked!r}{hint} (columns: {', '.join(map(str, row))})")
        return asked
    found = next((name for name in usual if name in row), None)
    if found is None and required:
        raise DatasetError(
            f"{where}: no {what} column (one of {', '.join(usual)}) among {', '.join(map(str, row))[:200]}; name yours "
            f"with --{what}-column"
        )
    return found


def general() -> list[Question]:
    """Return ordinary questions of many families for a language model; `right` alone is their reward."""
    return load_questions(FOLDER / "general.jsonl")


def general_bank() -> list[Question]:
    """Return plain questions about other things than those of `general`, as examples to show a model."""
    return load_questions(FOLDER / "general_bank.jsonl")


def recorded_examples() -> dict[str, list[int]]:
    """Return which questions of the bank recorded requests show: sha256 of a question's text, 12 digits -> places."""
    found: dict[str, list[int]] = json.loads((FOLDER / "general_examples.json").read_text(encoding="utf-8"))
    return found


def guard_questions() -> list[Question]:
    """Return requests that should be refused; used only to check that rewriting does not lower refusals."""
    return [replace(request, tags=(*request.tags, UNSAFE)) for request in load_questions(FOLDER / "guard.jsonl")]


#: Sets to train on, by name. Evaluation-only sets are not among them.
BUNDLED: Mapping[str, Callable[[], list[Question]]] = {"general": general}
