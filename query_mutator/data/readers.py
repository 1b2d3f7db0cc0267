"""Rows of JSONL, JSON, CSV and Parquet files, a few at a time; whatever is wrong with a file is a DatasetError."""

from __future__ import annotations

import csv
import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

from query_mutator.errors import DatasetError
from query_mutator.files import decode_object, parse_json
from query_mutator.types import Message, Role

Fields = dict[str, Any]
#: Line number in the file (1-based; of Parquet the row number), and the row's fields, or what is wrong with them.
Row = tuple[int, Fields | DatasetError]
_FIELD_CHARACTERS = 1 << 30  # of a CSV cell; Python's own limit is 131,072
_BATCH_ROWS = 4096  # of Parquet, in memory at once
_SHOWN_CHARS = 40  # of a value in a message
#: A list in a cell, as "['a' 'b']", "array(['a'], dtype=object)" or "[1, 2]", and what it holds.
_LIST = re.compile(r"(?:array\()?\[[^\[\]]*\](?:, dtype=\w+\)|\))?", re.DOTALL)
_ITEM = re.compile(r"'([^']*)'|\"([^\"]*)\"|([^\s,'\"]+)")


def read_rows(path: Path, *, columns: Collection[str] = ()) -> Iterator[Row]:
    """Return the rows of a file; of Parquet only those of `columns` that it has, so that memory stays small."""
    with _file_errors(path):
        if not path.is_file():
            found = "a folder" if path.is_dir() else "no such file"
            raise DatasetError(f"{path}: {found}; give a .jsonl, .json, .csv or .parquet file")
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return _parquet_rows(path, columns)
    readers = {".jsonl": _jsonl_rows, ".json": _json_rows, ".csv": _csv_rows}
    if suffix not in readers:
        raise DatasetError(f"{path}: unknown kind {suffix or 'without suffix'!r}; give .jsonl, .json, .csv or .parquet")
    return readers[suffix](path)


@contextmanager
def _file_errors(path: Path) -> Iterator[None]:
    """Turn what the operating system or a decoder says about a file into a DatasetError."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise DatasetError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8") from None
    except OSError as error:
        name = str(path) if len(str(path)) <= 300 else f"{str(path)[:100]}... ({len(str(path))} characters)"
        raise DatasetError(f"{name}: cannot be read ({error.strerror or error}); check the path") from None


def _jsonl_rows(path: Path) -> Iterator[Row]:
    with _file_errors(path), path.open("rb") as file:
        for line, text in enumerate(file, 1):
            if not text.strip():
                continue
            try:
                row: Fields | DatasetError = decode_object(text, parse_json)
            except ValueError as error:
                row = DatasetError(f"{path}:{line}: {error}; each line must be one JSON object in UTF-8")
            yield line, row


def _json_rows(path: Path) -> Iterator[Row]:
    """Yield the objects of a JSON list, or those in SQuAD's, TriviaQA's or a dataset viewer's object."""
    with _file_errors(path):
        content = path.read_bytes()
    try:
        value = parse_json(content)
    except ValueError as error:
        raise DatasetError(f"{path}: not JSON ({error})") from None
    for number, row in enumerate(_objects_in(value, str(path)), 1):
        fault = f"{path}:{number}: a JSON {type(row).__name__} where an object is expected"
        yield number, row if isinstance(row, dict) else DatasetError(fault)


def _objects_in(value: Any, where: str) -> Iterator[Any]:
    """Yield the rows of a JSON document."""
    rows = value
    if isinstance(value, dict):
        rows = next((value[name] for name in ("data", "rows", "Data") if isinstance(value.get(name), list)), None)
    if not isinstance(rows, list):
        seen = f"an object of {', '.join(value)[:200]}" if isinstance(value, dict) else f"a {type(value).__name__}"
        raise DatasetError(f"{where}: {seen}; give a list of objects, or an object whose `data` or `rows` is one")
    for row in rows:
        if isinstance(row, dict) and isinstance(row.get("paragraphs"), list):  # an article of SQuAD
            parts = [part for part in row["paragraphs"] if isinstance(part, dict)]
            yield from ({"context": part.get("context"), **qa} for part in parts for qa in part.get("qas") or ())
        elif isinstance(row, dict) and isinstance(row.get("row"), dict):  # of the hub's dataset viewer
            yield row["row"]
        elif isinstance(row, dict) and isinstance(row.get("Answer"), dict):  # TriviaQA's own files
            answer = {"value": row["Answer"].get("Value"), "aliases": row["Answer"].get("Aliases")}
            yield {"question": row.get("Question"), "question_id": row.get("QuestionId"), "answer": answer}
        else:
            yield row


def _csv_rows(path: Path) -> Iterator[Row]:
    csv.field_size_limit(_FIELD_CHARACTERS)
    with _file_errors(path), path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)  # strict: an open quote is an error, not the rest of the file
        try:
            _check_names(reader.fieldnames or (), f"{path}:1")
            for row in reader:
                found: Fields | DatasetError
                if None in row or None in row.values():
                    count = "more" if None in row else "fewer"
                    found = DatasetError(f"{path}:{reader.line_num}: {count} cells than the header")
                else:
                    found = {name: _listed(cell, name) for name, cell in row.items()}
                yield reader.line_num, found
        except csv.Error as error:
            raise DatasetError(f"{path}:{reader.line_num}: not CSV ({error}); check the quotes of the row") from None


def _listed(cell: str, name: str) -> str | list[str]:
    """Return the texts of a list of answers, as pandas and numpy write one into a cell; any other cell as it is."""
    if name not in ("accept", "answers") or not _LIST.fullmatch(cell.strip()):
        return cell
    return ["".join(parts) for parts in _ITEM.findall(cell.partition("[")[2].rpartition("]")[0])]


@contextmanager
def _parquet_errors(path: Path) -> Iterator[Any]:
    """Yield pyarrow.parquet; turn what it says about a file into a DatasetError."""
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise DatasetError(f"{path}: Parquet needs pyarrow; pip install 'query-mutator[parquet]'") from None
    try:
        yield parquet
    except DatasetError:
        raise
    # A damaged file gives any of these: pyarrow believes the sizes and types that are written in it.
    except (ArrowException, OSError, ValueError, TypeError, KeyError, MemoryError, OverflowError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DatasetError(f"{path}: not a readable Parquet file ({reason[:200]}); write it again") from None


def _parquet_rows(path: Path, columns: Collection[str]) -> Iterator[Row]:
    with _parquet_errors(path) as parquet, parquet.ParquetFile(path, page_checksum_verification=True) as file:
        names = file.schema_arrow.names
        _check_names(names, str(path))
        wanted = [name for name in names if name in columns]
        labels = _class_labels(file.schema_arrow.metadata or {})
        number = 0
        for batch in file.iter_batches(_BATCH_ROWS, columns=wanted or None):
            for row in batch.to_pylist():
                number += 1
                for name, words in labels.items():
                    if isinstance(place := row.get(name), int) and 0 <= place < len(words):
                        row[name] = words[place]
                yield number, row


def _class_labels(metadata: Mapping[bytes, bytes]) -> dict[str, list[str]]:
    """Return the words that the numbers of a column stand for, as the package `datasets` writes them into a file."""
    try:
        features = decode_object(metadata[b"huggingface"], parse_json)["info"]["features"]
        return {
            name: [str(word) for word in feature["names"]]
            for name, feature in features.items()
            if isinstance(feature, dict) and feature.get("_type") == "ClassLabel"
        }
    except (LookupError, ValueError, TypeError, AttributeError):
        return {}


def _check_names(names: Sequence[str], where: str) -> None:
    """Raise for a column that occurs twice: one of them would be lost."""
    twice = [name for name, count in Counter(names).items() if count > 1 and name]
    if twice:
        raise DatasetError(f"{where}: column {twice[0]!r} occurs twice; rename one")


# --- fields of a row -------------------------------------------------------------------------------------------------


def is_number(value: Any) -> bool:
    """Return whether a field is a finite number."""
    is_finite = isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
    return is_finite and not isinstance(value, bool)


def text_in(value: Any, name: str, where: str, *, may_be_empty: bool = False) -> str:
    """Return the text of a field without blanks around it; DatasetError for anything else."""
    if not isinstance(value, str) or not (value.strip() or may_be_empty):
        raise DatasetError(f"{where}: `{name}` must be a text, not {shown(value)}")
    return value.strip()


def gold_in(value: Any, name: str, where: str) -> tuple[str, ...]:
    """Return the accepted answers of a field."""
    values = value if isinstance(value, (list, tuple)) else () if value is None else (value,)
    is_numeric = bool(values) and all(map(is_number, values))
    if value is not None and not (
        values and (is_numeric or all(isinstance(one, str) and one.strip() for one in values))
    ):
        raise DatasetError(f"{where}: `{name}` must be a text, a number, or a list of one of them, not {shown(value)}")
    return tuple(str(one).strip() for one in values)


def fields_in(row: Fields | DatasetError) -> Fields:
    """Return the fields of a row; raise what is wrong with it."""
    if isinstance(row, DatasetError):
        raise row
    return row


def tags_in(row: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """Return the tags of a row; DatasetError unless they are texts."""
    tags = row.get("tags") or ()
    if not isinstance(tags, (list, tuple)) or not all(isinstance(tag, str) for tag in tags):
        raise DatasetError(f"{where}: `tags` must be a list of texts, not {shown(tags)}")
    return tuple(dict.fromkeys(tags))


def turns_in(value: Any, where: str) -> tuple[Message, ...]:
    """Return the messages of a field, as chat APIs have them; DatasetError for anything else."""
    rows = value if isinstance(value, (list, tuple)) and value else (None,)
    for row in rows:
        is_message = isinstance(row, dict) and isinstance(row.get("content"), str)
        if not is_message or row.get("role") not in get_args(Role):
            raise DatasetError(
                f"{where}: `messages` must be a list of objects with a `role` (system, user or assistant) and a "
                f"`content` that is text, not {shown(row or value)}"
            )
    return tuple(Message(role=row["role"], content=row["content"].strip()) for row in rows)


def shown(value: Any) -> str:
    """Return a value for a message."""
    return repr(value)[:_SHOWN_CHARS]
