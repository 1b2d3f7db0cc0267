"""Operators that clean English questions in this process: no model is called, so the rewrite costs nothing."""

from __future__ import annotations

from query_mutator.operators.base import LocalOperator, OperatorContext

__all__ = ["CLEANING_OPERATORS"]


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
