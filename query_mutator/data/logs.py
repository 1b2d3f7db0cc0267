"""Logged replies in, `LoggedReply` records out.

    {"question": ..., "form": ..., "reply": ..., "gold": ...}       one reply per row; or "label" in place of "gold"

`model` names who replied, where there are several.

A bad row is a DatasetError `file:line: ...`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from query_mutator.data.readers import fields_in, gold_in, read_rows, shown, tags_in, text_in
from query_mutator.errors import DatasetError
from query_mutator.types import AS_IS, MAX_NAME_CHARS

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
