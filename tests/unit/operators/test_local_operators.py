"""`how_to` and `emphasize` work on the phrase that `expand` leaves in brackets, without a model."""

from __future__ import annotations

import pytest

from query_mutator import operators
from query_mutator.operators import OperatorContext, would_change

QUESTION = "How do I get rid of a folder?"
EXPANDED = f"{QUESTION} (remove a directory tree)"


def rewrite(name: str, text: str, **context: str) -> str:
    operator, known = operators.get(name), OperatorContext(**{"original": QUESTION, **context})  # type: ignore[arg-type]
    local = operators.local_rewrite(operator)
    assert local is not None
    rewritten = local(text, context=known)
    assert would_change(operator, text, context=known) == (rewritten != text)
    return rewritten


def test_the_phrase_becomes_a_title_or_is_repeated_once() -> None:
    title, twice = "How to remove a directory tree (in Python)", f"{EXPANDED} (remove a directory tree)"
    assert rewrite("how_to", EXPANDED) == rewrite("how_to", twice) == rewrite("how_to", f"{EXPANDED}?") == title
    assert rewrite("emphasize", EXPANDED) == rewrite("emphasize", twice) == twice


@pytest.mark.parametrize("name", ["how_to", "emphasize"])
def test_a_title_and_a_question_without_a_phrase_stay(name: str) -> None:
    for text in ("How to remove a directory tree (in Python)", QUESTION, "sort (stable", "?", "()", " (x)"):
        assert rewrite(name, text) == text


@pytest.mark.parametrize("name", ["how_to", "emphasize"])
def test_brackets_that_the_user_wrote_are_no_phrase(name: str) -> None:
    typed = "how do I sort a list (descending)"
    assert rewrite(name, typed, original=typed) == typed
    assert rewrite(name, f"{typed} (sort in reverse)", original=typed) != f"{typed} (sort in reverse)"


def test_the_title_names_the_domain() -> None:
    assert rewrite("how_to", "q (p)", domain="the C library") == "How to p (in the C library)"
    assert rewrite("how_to", "q (p)", domain="Ruby’s gems") == "How to p (in Ruby)"


@pytest.mark.parametrize(
    "question", ["how do I hurt my neighbour", "get into somebody's account", "log 42", "run a.py"]
)
def test_a_question_that_names_a_person_property_or_a_name_stays_in_front(question: str) -> None:
    assert rewrite("how_to", f"{question} (end a process)") == f"{question} (end a process) (end a process)"


def test_a_child_process_is_no_person() -> None:
    assert rewrite("how_to", "stop the child process (end a process)") == "How to end a process (in Python)"
