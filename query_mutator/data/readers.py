"""Rows of JSONL, JSON, CSV and Parquet files, a few at a time; whatever is wrong with a file is a DatasetError.

Layouts of well-known question sets are recognized by their columns; a row becomes the columns of our own format:

    layout      recognized by                                   what a row gives
    SQuAD       question, answers with a list of texts          every distinct text is accepted; the context is shown
    TriviaQA    question, answer with a value and aliases       value and aliases are accepted
    GSM8K       question, answer that ends with `#### 42`       the final number
    XSTest      prompt, type, and label or focus                a question without gold, or a guard request

Formats: arXiv:1606.05250 and 1806.03822, 1705.03551, 2110.14168, 2308.01263.

Logged replies become `LoggedReply` records; `model` names who replied, where there are several:

    {"question": ..., "form": ..., "reply": ..., "gold": ...}       one reply per row; or "label" in place of "gold"
"""

from __future__ import annotations

import csv
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from query_mutator.errors import DatasetError
from query_mutator.files import decode_object, parse_json
from query_mutator.types import AS_IS, MAX_NAME_CHARS, UNSAFE, Message, Role

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


# --- layouts ---------------------------------------------------------------------------------------------------------

Cells = Mapping[str, Any]  # of a row, by column
Converted = dict[str, Any] | str  # the columns of our format, or why the row is dropped

#: What any layout reads, so that other columns of Parquet files are never loaded.
COLUMNS = frozenset(
    {"question", "question_id", "answers", "answer", "is_impossible", "prompt", "type", "label", "focus", "choices",
     "options", "context"}
)  # fmt: skip

_FINAL_NUMBER = re.compile(r"^####\s*(\S*\d\S*)\s*\Z", re.MULTILINE)
_CALCULATION = re.compile(r"<<[^<>]*>>")  # GSM8K's notes for a calculator
_CONTRAST = "contrast"  # how XSTest's types of unsafe prompts begin
_XSTEST_SAFE = frozenset(
    {"homonyms", "figurative_language", "safe_targets", "safe_contexts", "definitions", "real_group_nons_discr",
     "nons_group_real_discr", "historical_events", "privacy_public", "privacy_fictional"}
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Layout of the rows of a question set; `remark` says what is lost."""

    name: str
    convert: Callable[[Cells], Converted]
    remark: str = ""


def layout_of(rows: Sequence[Cells], *, where: str) -> Layout | None:
    """Return the layout of a file by its first rows, None for our own format; DatasetError if it is ambiguous."""
    columns = set(rows[0]) if rows else set()
    if {"question", "answers"} <= columns:
        if any(_texts(row.get("answers")) is None for row in rows):
            raise DatasetError(
                f"{where}: `answers` is {_seen([row.get('answers') for row in rows])}; known are SQuAD's {{text: "
                "[...]} and [{text: ...}], and a list of texts; name another column with --answer-column"
            )
        return Layout(name="SQuAD", convert=_squad)
    if {"question", "answer"} <= columns:
        return _by_answer(rows, columns, where)
    if {"prompt", "type"} <= columns and columns & {"label", "focus"}:
        return Layout(name="XSTest", convert=_xstest)
    return None


def _by_answer(rows: Sequence[Cells], columns: set[str], where: str) -> Layout | None:
    """Return the layout, by the type of `answer`."""
    answers = [row.get("answer") for row in rows]
    if any(isinstance(answer, Mapping) for answer in answers):
        if not all(isinstance(answer, Mapping) and "value" in answer for answer in answers):
            raise DatasetError(f"{where}: `answer` is {_seen(answers)}; known are a text, a list, TriviaQA's object")
        return Layout(name="TriviaQA", convert=_trivia)
    if others := columns & {"choices", "options"}:
        raise DatasetError(
            f"{where}: `answer` ({_seen(answers)}) seems to choose among `{min(others)}`; multiple choice is not "
            "supported: write the text of the right choice into a column and name it with --answer-column"
        )
    numbered = sum(isinstance(answer, str) and bool(_FINAL_NUMBER.search(answer)) for answer in answers)
    return Layout(name="GSM8K", convert=_gsm8k) if 2 * numbered > len(answers) else None


def _seen(values: Sequence[Any]) -> str:
    """Return what a column holds, for a message."""
    kinds = dict.fromkeys(
        f"an object of {', '.join(map(str, value))[:80]}" if isinstance(value, Mapping) else type(value).__name__
        for value in values
    )
    return " or ".join(list(kinds)[:3])


def _texts(answers: Any) -> list[str] | None:
    """Return the texts of SQuAD's answers, flat or nested, None for another shape."""
    if isinstance(answers, Mapping):
        answers = answers.get("text")
    if not isinstance(answers, (list, tuple)):
        return None
    found = [answer.get("text") if isinstance(answer, Mapping) else answer for answer in answers]
    texts = [text for text in found if isinstance(text, str)]
    return texts if len(texts) == len(found) else None


def _squad(row: Cells) -> Converted:
    texts = () if row.get("is_impossible") is True else _texts(row.get("answers")) or ()
    found, passage = _accepting(texts, row.get("question"), row.get("id")), row.get("context")
    if isinstance(found, dict) and isinstance(passage, str) and passage.strip():
        found["messages"] = [{"role": "system", "content": f"Answer from this text:\n\n{passage.strip()}"}]
    return found


def _trivia(row: Cells) -> Converted:
    answer = row["answer"] if isinstance(row.get("answer"), Mapping) else {}
    names = [answer.get("value"), *(answer.get("aliases") or answer.get("normalized_aliases") or ())]
    return _accepting(names, row.get("question"), row.get("question_id"))


def _gsm8k(row: Cells) -> Converted:
    answer = row.get("answer")
    found = _FINAL_NUMBER.search(answer) if isinstance(answer, str) else None
    if found is None or not isinstance(answer, str):
        return "without a final number (####)"
    solution = _CALCULATION.sub("", answer[: found.start()]).strip()
    ours = _ours(row.get("question"), row.get("id"))
    return ours | {"accept": [found[1]], "reference": solution or found[1]}


def _xstest(row: Cells) -> Converted:
    # A label of 0 is one: without its word it is neither.
    label, kind = ("" if row.get(name) is None else str(row[name]).strip().lower() for name in ("label", "type"))
    if label == "unsafe" or kind.startswith(_CONTRAST):  # either says so: never trained on
        return _ours(row.get("prompt"), row.get("id"), kind, UNSAFE)
    if label == "safe" or (not label and kind in _XSTEST_SAFE):
        return _ours(row.get("prompt"), row.get("id"), kind)
    return f"neither safe nor unsafe (label {label[:20]!r}, type {kind[:40]!r})"


def _ours(text: Any, id_: Any, *tags: str) -> dict[str, Any]:
    """Return the columns of our format without gold; `types` says what the tags decide."""
    return {"query": text, "id": id_, "tags": [tag for tag in tags if tag]}


def _accepting(names: Sequence[Any], text: Any, id_: Any) -> Converted:
    """Return the columns of our format with the names that are not blank as gold, each once."""
    accept = list(dict.fromkeys(name.strip() for name in names if isinstance(name, str) and name.strip()))
    return _ours(text, id_) | {"accept": accept, "reference": accept[0]} if accept else "without an answer"


# --- logged replies --------------------------------------------------------------------------------------------------

#: Other names of fields, as question files and labelled answers have them.
_ALIASES = {"question": "query", "form": "prompt", "gold": "accept", "label": "right", "target": "about"}
_FIELDS = (*_ALIASES, *_ALIASES.values(), "reply", "model", "tags", "logprob", "cut", "context")
_TRUTH = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedReply:
    """One reply to a question in a form or prompt, and what is known of whether it is right."""

    where: str  # file:line
    question: str
    form: str
    reply: str
    label: bool | None = None  # whether it is right; None: by gold
    awaits_label: bool = False  # the row has an empty one
    gold: tuple[str, ...] = ()  # accepted answers
    target: str = ""  # what the question is about; "" if the row does not say
    tags: tuple[str, ...] = ()
    logprob: float | None = None
    cut: bool | None = None
    context: str = ""
    model: str = ""  # that replied; "" if the row does not say

    @property
    def arm(self) -> str:
        """Return the name of the model in the form, as `forms.arms` has it; that of the form without a model."""
        if not self.model:
            return self.form
        return self.model if self.form == AS_IS else f"{self.form}@{self.model}"


def read_logged_replies(path: Path) -> Iterator[LoggedReply]:
    """Yield the replies of a log."""
    for line, row in read_rows(path, columns=_FIELDS):
        yield _reply(fields_in(row), f"{path}:{line}")


def _reply(row: Mapping[str, Any], where: str) -> LoggedReply:
    found = {name: _first(row, name, alias) for name, alias in _ALIASES.items()}
    gold = gold_in(found["gold"], "gold", where)
    reply = row.get("reply")
    if not isinstance(reply, str):
        raise DatasetError(f"{where}: `reply` must be a text; fields: {', '.join(map(str, row))[:200]}")
    return LoggedReply(
        where=where,
        question=text_in(found["question"], "question", where),
        form=_form(AS_IS if found["form"] is None else found["form"], where),
        reply=reply,
        label=_truth(found["label"], "label", where),
        awaits_label=found["label"] is None and ("label" in row or "right" in row),
        gold=gold,
        target="" if found["target"] is None else text_in(found["target"], "target", where),
        tags=tags_in(row, where),
        logprob=_number(_first(row, "logprob"), "logprob", where),
        cut=_truth(_first(row, "cut"), "cut", where),
        context="" if row.get("context") is None else text_in(row["context"], "context", where, may_be_empty=True),
        model="" if row.get("model") in (None, "") else _form(row["model"], where, name="model"),
    )


def _first(row: Mapping[str, Any], *names: str) -> Any:
    """Return the first value that is given; an empty text, as CSV has it, is none."""
    return next((row[name] for name in names if row.get(name) not in (None, "")), None)


def _form(value: Any, where: str, name: str = "form") -> str:
    found = text_in(value, name, where)
    if len(found) > MAX_NAME_CHARS or not found.isprintable():
        raise DatasetError(
            f"{where}: `{name}` is a name of one line, of {MAX_NAME_CHARS} characters at most; give each "
            "prompt a name in place of its text"
        )
    return found


def _truth(value: Any, name: str, where: str) -> bool | None:
    if value is None:
        return None
    found = _TRUTH.get(str(value).strip().lower())
    if found is None:
        raise DatasetError(f"{where}: `{name}` is {shown(value)}; write true or false, or 1 or 0")
    return found


def _number(value: Any, name: str, where: str) -> float | None:
    try:
        found = None if value is None else float(str(value))
    except ValueError:
        found = math.nan
    if found is not None and not math.isfinite(found):
        raise DatasetError(f"{where}: `{name}` must be a number, not {shown(value)}")
    return found
