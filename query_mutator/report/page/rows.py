"""What the rows of a run's files must hold before a page is made of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from query_mutator.errors import UsageError

__all__ = ["check_metrics", "check_outcomes", "check_steps"]

Row = Mapping[str, Any]
Test = Callable[[object], bool]
_SHOWN_CHARS = 60  # of a wrong value


def _is(*kinds: type) -> Test:
    return lambda value: isinstance(value, kinds)


def _or_none(test: Test) -> Test:
    return lambda value: value is None or test(value)


def _list_of(test: Test) -> Test:
    return lambda value: isinstance(value, list) and all(map(test, value))


_number, _text, _whole = _is(int, float), _is(str), _is(int)


def _parts(value: object) -> bool:
    return isinstance(value, dict) and all(map(_number, value.values()))


def _error(value: object) -> bool:
    return value is None or (isinstance(value, dict) and {"kind", "message"} <= value.keys())


_STEP: Mapping[str, Test] = {
    **dict.fromkeys(("env", "step", "episode"), _whole),
    **dict.fromkeys(("question_id", "question", "operator", "rewrite", "answer"), _text),
    **dict.fromkeys(("score", "reward"), _number),
    "baseline_score": _or_none(_number),
    "calls": _whole,
    "parts": _parts,
    "valid": _is(bool),
    **dict.fromkeys(("guard", "form", "first_answer"), _or_none(_text)),
    "first_parts": _or_none(_parts),
    "cut": _or_none(_is(dict)),
    "submitted": _or_none(_whole),
    "error": _error,
}
_OUTCOME: Mapping[str, Test] = {
    **dict.fromkeys(("method", "set", "question_id", "question", "target", "why"), _text),
    **dict.fromkeys(("steps", "rewrites", "asked", "forms", "answers", "tags", "accepted"), _list_of(_text)),
    **dict.fromkeys(("calls", "tokens", "seconds"), _number),
    **dict.fromkeys(("success", "score", "reply_tokens"), _or_none(_number)),
    **dict.fromkeys(("scores", "fits"), _list_of(_number)),
    "guards": _list_of(_or_none(_text)),
    "parts": _list_of(_parts),
    "refused": _or_none(_is(bool)),
    "submitted": _or_none(_whole),
    "error": _error,
}


def check_steps(rows: Sequence[Row], path: Path) -> None:
    """Raise a UsageError for a row that is not one of transcripts.jsonl."""
    for row in rows:
        _check(row, _STEP, path)


def check_outcomes(rows: Sequence[Row], path: Path) -> None:
    """Raise a UsageError for a row that is not one of evaluation.jsonl."""
    for row in rows:
        _check(row, _OUTCOME, path)
        answers, is_scored = len(row["answers"]), row.get("error") is None
        lengths = [row["asked"], *(row[name] for name in ("forms", "parts", "scores", "fits") if row.get(name))]
        if any(len(each) != answers for each in lengths) or len(row["steps"]) != len(row["rewrites"]):
            raise _wrong(path, "steps and rewrites, or answers and their scores", "lists of different lengths")
        if is_scored and not (row.get("success") is not None and 0 <= (row.get("submitted") or 0) < answers):
            raise _wrong(path, "submitted", row.get("submitted"))


def check_metrics(rows: Sequence[Row], path: Path) -> None:
    """Raise a UsageError for a row that is not one of metrics.jsonl."""
    for row in rows:
        _check(row, {"step": _number}, path)
        for name, value in row.items():
            if not (value is None or isinstance(value, (int, float)) or name == "crc"):
                raise _wrong(path, name, value)


def _check(row: Row, shape: Mapping[str, Test], path: Path) -> None:
    for name, test in shape.items():
        if not test(row.get(name)):
            raise _wrong(path, name, row.get(name, "missing"))


def _wrong(path: Path, name: str, value: object) -> UsageError:
    shown = repr(value)
    shown = shown if len(shown) <= _SHOWN_CHARS else f"{shown[:_SHOWN_CHARS]}…"
    return UsageError(f"{path}: not a file of a run, in a row `{name}` is {shown}; restore it, or take it away")
