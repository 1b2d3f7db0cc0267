"""Question files in, `Question` records out: JSONL, CSV and Parquet, every bad row named with file and line."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from query_mutator.data import pynames
from query_mutator.errors import DatasetError
from query_mutator.registry import nearest
from query_mutator.types import Question

Row = tuple[int, dict[str, Any]]  # line number in the file (1-based), the row's fields
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
    if not path.is_file():
        raise DatasetError(f"{path}: no such file; give a .jsonl, .csv or .parquet file")
    questions: list[Question] = []
    lines: dict[str, int] = {}
    for line, row in _rows(path):
        question = _question(row, f"{path}:{line}", len(questions), question_column, answer_column)
        if question.id in lines:
            raise DatasetError(f"{path}:{line}: id {question.id!r} stands in line {lines[question.id]} already")
        lines[question.id] = line
        questions.append(question)
    if not questions:
        raise DatasetError(f"{path}: no questions in it; each row needs a question column such as `query`")
    return questions


def _rows(path: Path) -> Iterator[Row]:
    suffix = path.suffix.lower()
    readers = {".jsonl": _jsonl_rows, ".csv": _csv_rows, ".parquet": _parquet_rows}
    if suffix not in readers:
        raise DatasetError(f"{path}: unknown kind {suffix or 'without suffix'!r}; give .jsonl, .csv or .parquet")
    try:
        yield from readers[suffix](path)
    except UnicodeDecodeError as error:
        raise DatasetError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8") from None


def _jsonl_rows(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig") as file:
        for line, text in enumerate(file, 1):
            if not text.strip():
                continue
            try:
                row = json.loads(text)
            except ValueError as error:
                raise DatasetError(f"{path}:{line}: not JSON ({error}); each line must be one JSON object") from None
            if not isinstance(row, dict):
                raise DatasetError(f"{path}:{line}: a JSON {type(row).__name__}; each line must be one JSON object")
            yield line, row


def _csv_rows(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file)
        for row in reader:
            if None in row or None in row.values():
                raise DatasetError(
                    f"{path}:{reader.line_num}: {'more' if None in row else 'fewer'} cells than the header"
                )
            yield reader.line_num, dict(row)


def _parquet_rows(path: Path) -> Iterator[Row]:
    try:
        from pyarrow import ArrowInvalid, parquet
    except ImportError:
        raise DatasetError(f"{path}: Parquet needs pyarrow; pip install 'query-mutator[parquet]'") from None
    try:
        table = parquet.read_table(path)
    except ArrowInvalid as error:
        raise DatasetError(f"{path}: not a readable Parquet file ({str(error).splitlines()[0]})") from None
    yield from enumerate(table.to_pylist(), 1)


def _question(
    row: dict[str, Any], where: str, index: int, question_column: str | None, answer_column: str | None
) -> Question:
    text = row.get(_column(row, question_column, QUESTION_COLUMNS, where, "question") or "")
    if not isinstance(text, str) or not text.strip():
        raise DatasetError(
            f"{where}: the question is {'empty' if not text else 'not a text'}; fill it in or drop the row"
        )
    accept, reference = _gold(row, where, answer_column)
    tags = row.get("tags") or ()
    if not isinstance(tags, (list, tuple)) or not all(isinstance(tag, str) for tag in tags):
        raise DatasetError(f"{where}: `tags` must be a list of texts")
    return Question(
        id=str(row["id"] if row.get("id") not in (None, "") else index),
        text=text.strip(),
        accept=accept,
        reference=reference,
        tags=tuple(tags),
    )


def _gold(row: dict[str, Any], where: str, answer_column: str | None) -> tuple[tuple[str, ...], str | None]:
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
    elif value is not None and not isinstance(value, str):
        accept = (str(value),)
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
