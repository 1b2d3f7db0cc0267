"""Question files in, `Question` records out: JSONL, CSV and Parquet, every bad row named with file and line."""

from __future__ import annotations

import math
from array import array
from pathlib import Path
from typing import Any

import numpy as np

from query_mutator.data import pynames
from query_mutator.data.readers import read_rows
from query_mutator.errors import DatasetError
from query_mutator.registry import nearest
from query_mutator.types import Question

Gold = tuple[tuple[str, ...], str | None]  # accepted names, reference
KNOWN_ANSWERS = 1 << 16
QUESTION_COLUMNS = ("query", "question", "prompt", "text")
ANSWER_COLUMNS = ("accept", "answer", "reference", "response")


def load_questions(
    path: str | Path, *, question_column: str | None = None, answer_column: str | None = None
) -> list[Question]:
    """Return the questions of a `.jsonl`, `.csv` or `.parquet` file; a bad row is a DatasetError `file:line: ...`.

    Without a column name the first of `query, question, prompt, text` is the question and the first of
    `accept, answer, reference, response` the gold: a list holds names that count as right, a text is one good answer.
    """
    path = Path(path)
    asked = {name for name in (question_column, answer_column) if name is not None}
    columns = {*QUESTION_COLUMNS, *ANSWER_COLUMNS, "id", "tags"} | asked
    questions: list[Question] = []
    lines = array("q")
    known: dict[Gold, Gold] = {}  # answers repeat; one object for each saves a third of the memory of large files
    for line, row in read_rows(path, columns=columns):
        questions.append(_question(row, f"{path}:{line}", len(questions), question_column, answer_column, known))
        lines.append(line)
    if not questions:
        raise DatasetError(f"{path}: no questions in it; each row needs a question column such as `query`")
    _check_ids(path, questions, lines)
    return questions


def _check_ids(path: Path, questions: list[Question], lines: array[int]) -> None:
    """Raise for an id that occurs twice."""
    # Sorted hashes find candidates in 8 bytes a question, where a set of ids takes a hundred.
    hashes = np.fromiter((hash(question.id) for question in questions), np.int64, len(questions))
    in_order = np.sort(hashes)
    doubled = in_order[1:][in_order[1:] == in_order[:-1]]
    seen: dict[str, int] = {}
    for place in np.flatnonzero(np.isin(hashes, doubled)).tolist() if len(doubled) else ():
        name, line = questions[place].id, lines[place]
        if name in seen:
            raise DatasetError(f"{path}:{line}: id {name!r} is already in line {seen[name]}; give each row another id")
        seen[name] = line


def _question(
    row: dict[str, Any],
    where: str,
    index: int,
    question_column: str | None,
    answer_column: str | None,
    known: dict[Gold, Gold],
) -> Question:
    text = row.get(_column(row, question_column, QUESTION_COLUMNS, where, "question") or "")
    if not isinstance(text, str) or not text.strip():
        what = "empty" if text is None or isinstance(text, str) else "not a text"
        raise DatasetError(f"{where}: the question is {what}; fill it in or drop the row")
    gold = _gold(row, where, answer_column)
    accept, reference = known.setdefault(gold, gold) if len(known) < KNOWN_ANSWERS else known.get(gold, gold)
    tags = row.get("tags") or ()
    if not isinstance(tags, (list, tuple)) or not all(isinstance(tag, str) for tag in tags):
        raise DatasetError(f"{where}: `tags` must be a list of texts")
    return Question(
        id=_id(row.get("id"), where, index),
        text=text.strip(),
        accept=accept,
        reference=reference,
        tags=tuple(tags),
    )


def _id(value: Any, where: str, index: int) -> str:
    """Return the id of a row, by default its number among the rows."""
    if value is None or value == "":
        return str(index)
    if not (isinstance(value, str) or _is_number(value)):
        raise DatasetError(f"{where}: `id` must be a text or a number, not {str(value)[:80]!r}")
    return str(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))


def _gold(row: dict[str, Any], where: str, answer_column: str | None) -> Gold:
    """Return (accepted names, reference); `reference` defaults to the docstring of `accept[0]`."""
    column = _column(row, answer_column, ANSWER_COLUMNS, where, "answer", required=False)
    value = row.get(column) if column else None
    reference = row.get("reference")
    accept: tuple[str, ...] = ()
    if isinstance(value, (list, tuple)):
        if not value or not all(isinstance(name, str) and name.strip() for name in value):
            raise DatasetError(f"{where}: `{column}` must be a list of at least one name")
        accept = tuple(name.strip() for name in value)
    elif isinstance(value, str) and value.strip():
        reference = reference or value
        if column != "reference":
            accept = (value.strip(),)
    elif _is_number(value):
        accept = (str(value),)
    elif value is not None and not isinstance(value, str):
        raise DatasetError(f"{where}: `{column}` must be a text, a number or a list of names, not {str(value)[:80]}")
    if reference is not None and not isinstance(reference, str):
        raise DatasetError(f"{where}: `reference` must be a text")
    if not reference and accept:
        reference = pynames.first_paragraph(accept[0])
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
        raise DatasetError(f"{where}: no {what} column (one of {', '.join(usual)}); name yours with --{what}-column")
    return found
