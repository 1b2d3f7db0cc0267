"""Layouts of well-known question sets, recognized by their columns; a row becomes the columns of our own format.

    layout      recognized by                                   what a row gives
    SQuAD       question, answers with a list of texts          every distinct text is accepted; the context is shown
    TriviaQA    question, answer with a value and aliases       value and aliases are accepted
    GSM8K       question, answer that ends with `#### 42`       the final number
    XSTest      prompt, type, and label or focus                a question without gold, or a guard request

Formats: arXiv:1606.05250 and 1806.03822, 1705.03551, 2110.14168, 2308.01263.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from query_mutator.errors import DatasetError
from query_mutator.types import UNSAFE

Fields = Mapping[str, Any]
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
    convert: Callable[[Fields], Converted]
    remark: str = ""


def layout_of(rows: Sequence[Fields], *, where: str) -> Layout | None:
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


def _by_answer(rows: Sequence[Fields], columns: set[str], where: str) -> Layout | None:
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


def _squad(row: Fields) -> Converted:
    texts = () if row.get("is_impossible") is True else _texts(row.get("answers")) or ()
    found, passage = _accepting(texts, row.get("question"), row.get("id")), row.get("context")
    if isinstance(found, dict) and isinstance(passage, str) and passage.strip():
        found["messages"] = [{"role": "system", "content": f"Answer from this text:\n\n{passage.strip()}"}]
    return found


def _trivia(row: Fields) -> Converted:
    answer = row["answer"] if isinstance(row.get("answer"), Mapping) else {}
    names = [answer.get("value"), *(answer.get("aliases") or answer.get("normalized_aliases") or ())]
    return _accepting(names, row.get("question"), row.get("question_id"))


def _gsm8k(row: Fields) -> Converted:
    answer = row.get("answer")
    found = _FINAL_NUMBER.search(answer) if isinstance(answer, str) else None
    if found is None or not isinstance(answer, str):
        return "without a final number (####)"
    solution = _CALCULATION.sub("", answer[: found.start()]).strip()
    ours = _ours(row.get("question"), row.get("id"))
    return ours | {"accept": [found[1]], "reference": solution or found[1]}


def _xstest(row: Fields) -> Converted:
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
