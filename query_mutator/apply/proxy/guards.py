"""Checks that a rewrite must pass before it may replace a user's question."""

from __future__ import annotations

import re

__all__ = ["rewrite_problem"]

MAX_GROWTH = 4.0  # times the question's characters, for questions longer than SHORT_CHARS
SHORT_CHARS = 60
_NUMBER = re.compile(r"\d+(?:[.,:]\d+)*")
_QUOTED = re.compile(r"\"([^\"\n]{1,200})\"|“([^”\n]{1,200})”|`([^`\n]{1,200})`|(?<!\w)'([^'\n]{2,200})'(?!\w)")
_NAME = re.compile(r"(?<![.!?]\s)(?<!^)(?<![\w'])([A-Z][a-z]+[A-Z]\w*|[A-Z]{2,}\w*|[A-Z][a-z]{2,})\b")
_IDENTIFIER = re.compile(r"\b\w+(?:[._]\w+)+\b|\b\w+\(\)")
#: Beginnings of an answer in place of a rewrite.
_ANSWERS = re.compile(
    r"\A\s*(?:(?:sure|certainly|of course|okay)[,!.]|here(?:'s| is| are)\b|to \w+ [^?]{20,}\byou (?:can|should|need)\b"
    r"|you (?:can|should|could|need to)\b|use `|the (?:answer|rewritten|question) )",
    re.IGNORECASE,
)


def rewrite_problem(question: str, rewrite: str) -> str | None:
    """Return in one word what is wrong with a rewrite of `question`, None if it may be asked."""
    if not rewrite.strip():
        return "empty"
    if len(rewrite) > MAX_GROWTH * max(len(question), SHORT_CHARS):
        return "length"
    if _ANSWERS.search(rewrite) and not _ANSWERS.search(question):
        return "answer"
    folded = " ".join(rewrite.casefold().split())
    kept = {
        "numbers": _NUMBER.findall(question),
        "quotes": ["".join(groups) for groups in _QUOTED.findall(question)],
        "code": _IDENTIFIER.findall(question),
        "names": [] if question.isupper() else _NAME.findall(question),
    }
    return next(
        (
            what
            for what, parts in kept.items()
            if any(" ".join(part.casefold().split()) not in folded for part in parts)
        ),
        None,
    )
