"""Logged replies in, `LoggedReply` records out: your own log, or the pairs of `qm serve --shadow`.

    {"question": ..., "form": ..., "reply": ..., "gold": ...}       one reply per row; or "label" in place of "gold"

A bad row is a DatasetError `file:line: ...`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from query_mutator.cli.outputs import holding
from query_mutator.data.readers import Row, is_number, read_rows, tags_in
from query_mutator.errors import DatasetError
from query_mutator.runs.shadow import MARK, ORIGINAL, REWRITTEN, SHADOW, read_shadow
from query_mutator.types import AS_IS, MAX_NAME_CHARS, NUMERIC

#: Other names of fields, as question files and labelled answers have them.
_ALIASES = {"question": "query", "form": "prompt", "gold": "accept", "label": "right", "target": "about"}
_FIELDS = (*_ALIASES, *_ALIASES.values(), "reply", "tags", "logprob", "cut", "context")
_TRUTH = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
_SHOWN_CHARS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedReply:
    """One reply to a question in a form or prompt, and what is known of whether it is right."""

    where: str  # file:line
    question: str
    form: str
    reply: str
    label: bool | None = None  # whether it is right; None: by gold
    gold: tuple[str, ...] = ()  # accepted answers
    is_preferred: bool | None = None  # by the judge, to the reply of the other way; None: a tie, or no judge
    is_traffic: bool = False  # of `qm serve --shadow`, where few replies have a label or gold
    target: str = ""  # what the question is about; "" if the row does not say
    tags: tuple[str, ...] = ()
    logprob: float | None = None
    cut: bool | None = None
    context: str = ""


def log_path(path: Path) -> Path:
    """Return the file of a log: of a run folder that of `qm serve --shadow`."""
    return path / SHADOW if path.is_dir() else path


def read_logged_replies(path: Path) -> Iterator[LoggedReply]:
    """Yield the replies of a log, or of a file of `qm serve --shadow`."""
    is_traffic = path.is_file() and holding(MARK)(path)
    for line, row in _traffic_rows(path) if is_traffic else read_rows(path, columns=_FIELDS):
        yield _reply(row, f"{path}:{line}", is_traffic=is_traffic)


def _traffic_rows(path: Path) -> Iterator[Row]:
    """Yield both ways of each pair as rows of a log, one for a pair whose ways are the same."""
    for line, pair in enumerate(read_shadow(path), 2):
        is_reworded = pair["rewrite"] != pair["question"]
        names = [*(pair["operators"] if is_reworded else ()), *([pair["form"]] if pair["form"] != AS_IS else ())]
        ways = {ORIGINAL: AS_IS} | ({REWRITTEN: " > ".join(names)} if names else {})
        choice = (pair.get("judge") or {}).get("choice")
        for way, form in ways.items():
            preferred = choice == way if choice in (ORIGINAL, REWRITTEN) else None
            own = {**pair[way], "reply": pair[way]["answer"], "form": form, "preferred": preferred}
            yield line, {**pair, **own}


def _reply(row: Mapping[str, Any], where: str, *, is_traffic: bool) -> LoggedReply:
    found = {name: _first(row, name, alias) for name, alias in _ALIASES.items()}
    gold, is_numeric = _gold(found["gold"], where)
    reply = row.get("reply")
    if not isinstance(reply, str):
        raise DatasetError(f"{where}: `reply` must be a text; fields: {', '.join(map(str, row))[:200]}")
    return LoggedReply(
        where=where,
        question=_text(found["question"], "question", where),
        form=_form(AS_IS if found["form"] is None else found["form"], where),
        reply=reply,
        label=_truth(found["label"], "label", where),
        gold=gold,
        is_preferred=row.get("preferred") if is_traffic else None,
        is_traffic=is_traffic,
        target="" if found["target"] is None else _text(found["target"], "target", where),
        tags=(*tags_in(row, where), *((NUMERIC,) if is_numeric else ())),
        logprob=_number(_first(row, "logprob"), "logprob", where),
        cut=_truth(_first(row, "cut"), "cut", where),
        context="" if row.get("context") is None else _text(row["context"], "context", where, may_be_empty=True),
    )


def _first(row: Mapping[str, Any], *names: str) -> Any:
    """Return the first value that is given; an empty text, as CSV has it, is none."""
    return next((row[name] for name in names if row.get(name) not in (None, "")), None)


def _text(value: Any, name: str, where: str, *, may_be_empty: bool = False) -> str:
    if not isinstance(value, str) or not (value.strip() or may_be_empty):
        raise DatasetError(f"{where}: `{name}` must be a text, not {_shown(value)}")
    return value.strip()


def _form(value: Any, where: str) -> str:
    name = _text(value, "form", where)
    if len(name) > MAX_NAME_CHARS or not name.isprintable():
        raise DatasetError(
            f"{where}: `form` (or `prompt`) is a name of one line, of {MAX_NAME_CHARS} characters at most; give each "
            "prompt a name in place of its text"
        )
    return name


def _gold(value: Any, where: str) -> tuple[tuple[str, ...], bool]:
    """Return the accepted answers, and whether they are numbers."""
    values = value if isinstance(value, (list, tuple)) else () if value is None else (value,)
    is_numeric = bool(values) and all(is_number(one) and not isinstance(one, bool) for one in values)
    if value is not None and not (
        values and (is_numeric or all(isinstance(one, str) and one.strip() for one in values))
    ):
        raise DatasetError(f"{where}: `gold` must be a text, a number, or a list of one of them, not {_shown(value)}")
    return tuple(str(one).strip() for one in values), is_numeric


def _truth(value: Any, name: str, where: str) -> bool | None:
    if value is None:
        return None
    found = _TRUTH.get(str(value).strip().lower())
    if found is None:
        raise DatasetError(f"{where}: `{name}` is {_shown(value)}; write true or false, or 1 or 0")
    return found


def _number(value: Any, name: str, where: str) -> float | None:
    try:
        found = None if value is None or isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if isinstance(value, bool) or (found is not None and not math.isfinite(found)):
        raise DatasetError(f"{where}: `{name}` must be a number, not {_shown(value)}")
    return found


def _shown(value: Any) -> str:
    return repr(value)[:_SHOWN_CHARS]
