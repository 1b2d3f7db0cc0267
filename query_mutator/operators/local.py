"""Operators that a rule carries out in the process: no model is called, so the rewrite costs nothing.

`how_to` and `emphasize` use what `expand` leaves at the end of a question, in brackets: the question in the field's own
terms. The others clean English questions (`cleaning.py`, loaded at the first use).
"""

from __future__ import annotations

import re

from query_mutator.operators.base import LocalOperator, OperatorContext

__all__ = ["CLEANING_OPERATORS", "LOCAL_OPERATORS"]

_BRACKET = re.compile(r"(?P<question>.*\S) \((?P<phrase>[^()]+)\)[.?!]?", re.DOTALL)


def how_to(text: str, context: OperatorContext) -> str:
    """Return "How to <phrase> (in <field>)" for "question (phrase)".

    A phrase without its question could hide whom a request is about, or lose a name: there the question stays, and the
    phrase is emphasized.
    """
    found = _added_phrase(text, context)
    if found is None:
        return text
    question, phrase = found
    if _has_essentials(question):
        return emphasize(text, context)
    return f"How to {phrase} ({_field(context)})"


def emphasize(text: str, context: OperatorContext) -> str:
    """Return "question (phrase) (phrase)" for "question (phrase)"."""
    found = _added_phrase(text, context)
    if found is None or found[0].endswith(f"({found[1]})"):
        return text
    return f"{found[0]} ({found[1]}) ({found[1]})"


def _added_phrase(text: str, context: OperatorContext) -> tuple[str, str] | None:
    """Return a question and the phrase in brackets at its end; None if there is none, or the user wrote it."""
    found = _BRACKET.fullmatch(text)
    if found is None or found["phrase"] == _field(context):
        return None
    is_added = context.original is None or text.count("(") > context.original.count("(")
    return (found["question"], found["phrase"]) if is_added else None


def _field(context: OperatorContext) -> str:
    """Return "in Python" for the domain "Python's standard library": the short name of the field."""
    return "in " + re.split(r"['’]s\s", context.domain)[0]


def _has_essentials(question: str) -> bool:
    from query_mutator.embedded.rules.essential import has_essentials  # loads numpy

    return has_essentials(question)


LOCAL_OPERATORS = (
    LocalOperator(name="how_to", summary="Ask for what `expand` added in brackets, as a short title.", function=how_to),
    LocalOperator(name="emphasize", summary="Repeat what `expand` added in brackets.", function=emphasize),
)


def _cleaning(name: str, summary: str) -> LocalOperator:
    def rewrite(text: str, context: OperatorContext) -> str:
        from query_mutator.operators import cleaning  # loads numpy and the word lists

        return str(getattr(cleaning, name)(text))

    return LocalOperator(name=name, summary=summary, function=rewrite)


CLEANING_OPERATORS = (
    _cleaning("clean", "Clean an English question: all of the following in order."),
    _cleaning("shorthand", "Spell out chat shorthand: `wat`, `pls`, `u`."),
    _cleaning("typos", "Correct misspelt English words; names, code and quoted text stay."),
    _cleaning("courtesy", "Drop greetings, thanks and politeness."),
    _cleaning("core", "Keep the sentences that ask and what they need; drop back-story."),
    _cleaning("tidy", "Begin with a capital, end with the question mark."),
)
