r"""Explicit marks of a final answer: \boxed{}, "answer is", <answer>, ####, a field of JSON.

`marked` returns what they hold, the last mark first.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from query_mutator.reading.patterns import Patterns, word_list

P = Patterns("marks")

_FIELDS = tuple(word_list("marks", "FIELDS"))
_HASHES = re.compile(r"(?:^|\n|(?<=\s))####\s?(?!#)")
_TAG = re.compile(r"<(answer|final_answer|final|result)>|\[(ANSWER|PYTHON|FINAL)\]", re.IGNORECASE)
_OBJECT_CHARS = 8000
_MOST_MARKS = 8  # of a kind, from the end


def boxed(text: str) -> Iterator[tuple[int, int, str]]:
    r"""Yield the contents of \boxed{} with their places, braces balanced; each character is read twice at most."""
    for command in ("\\boxed", "\\fbox"):
        end = 0
        while (start := text.find(command, end)) >= 0:
            at = start + len(command)
            while at < len(text) and text[at] in " \t":
                at += 1
            if at < len(text) and text[at] != "{":
                end = at + 1
                word = re.compile(r"[\w.+-]{1,30}").match(text, at)
                if word:
                    yield start, word.end(), word[0]
                continue
            depth, end = 0, at
            while end < len(text):
                depth += (text[end] == "{") - (text[end] == "}")
                end += 1
                if depth == 0:
                    break
            yield start, end, text[at + 1 : end - (depth == 0)]


def json_fields(text: str, question: str) -> Iterator[tuple[int, int, Any]]:
    """Yield the values of answer fields in the outermost JSON objects of a text, with the objects' places.

    Without such a field, that of a field which the question names or which is the only one besides explanations.
    """
    decoder = json.JSONDecoder()
    at = text.find("{")
    tries = 0
    while at >= 0 and tries < 20:
        tries += 1
        try:
            value, length = decoder.raw_decode(text[at : at + _OBJECT_CHARS])
        except (ValueError, RecursionError):
            loose = P.LOOSE.match(text, at)
            if loose:
                yield at, loose.end(), loose[1] or loose[2]
                at = text.find("{", loose.end())
                continue
            at = text.find("{", at + 1)
            continue
        if isinstance(value, dict) and (found := _field(value) or _asked_field(value, question)) is not None:
            yield at, at + length, found[0]
        at = text.find("{", at + length)


def _asked_field(value: dict[str, Any], question: str) -> tuple[Any] | None:
    named = [one for name, one in value.items() if re.search(rf"\b{re.escape(name)}\b", question, re.IGNORECASE)]
    others = [one for name, one in value.items() if not P.EXPLAINS.search(name)]
    found = named if len(named) == 1 else others
    return (found[0],) if len(found) == 1 and not isinstance(found[0], dict) else None


def _field(value: dict[str, Any]) -> tuple[Any] | None:
    """Return the value of the most trusted field in an object or one inside it."""
    lowered = {str(name).lower().replace(" ", "_"): one for name, one in value.items()}
    for name in _FIELDS:
        if name in lowered:
            inner = lowered[name]
            return _field(inner) or (inner,) if isinstance(inner, dict) else (inner,)
    for inner in value.values():
        if isinstance(inner, dict) and (found := _field(inner)) is not None:
            return found
    return None


_ANSWER = re.compile(r"(?:^|\n)[^\w\n]{0,20}(?:final )?answer\W{0,5}[:：]\W{0,20}(?P<answer>[^\n]+)", re.IGNORECASE)


def last_answer(reply: str) -> str:
    """Return what follows the last "Answer:" of a reply, else its last line."""
    found = [match["answer"] for match in _ANSWER.finditer(reply)]
    lines = [line.strip() for line in reply.splitlines() if line.strip()]
    return found[-1] if found else (lines[-1] if lines else reply)


def after_mark(text: str) -> str:
    """Return what follows the last mark of a final answer, up to the end of its line; else the whole text."""
    found = list(P.DECIDED.finditer(text))
    rest = text[found[-1].end() :].strip() if found else ""
    return rest.partition("\n")[0] if rest else text


def labels(text: str) -> Iterator[tuple[int, int]]:
    """Yield the places of words that announce an answer."""
    for one in (P.HEADING, P.LABEL, _HASHES):
        for match in list(one.finditer(text))[-_MOST_MARKS:]:
            yield match.start(), match.end()


def ticked(text: str) -> Iterator[tuple[int, int, str]]:
    """Yield the letter of the only ticked line of a form or table."""
    found = list(P.TICKED.finditer(text))
    if len(found) == 1:
        yield found[0].start(), found[0].end(), found[0][1] or found[0][2]


def tagged(text: str) -> Iterator[tuple[int, int, str]]:
    """Yield what stands between <answer> and </answer>, with its place."""
    for match in list(_TAG.finditer(text))[-_MOST_MARKS:]:
        name = match[1] or match[2]
        closing = f"</{name}>" if match[1] else f"[/{name}]"
        end = text.find(closing, match.end())
        yield match.start(), len(text) if end < 0 else end, text[match.end() : len(text) if end < 0 else end]
