"""The order in which forms are asked."""

from __future__ import annotations

import numpy as np

from query_mutator.confidence import Attempt, LoggedAnswer, greedy_order, places_by_question, training_table

FORMS = ("first", "useful", "useless")


def answers(question: int, forms: tuple[str, ...]) -> list[LoggedAnswer]:
    """Return answers of which the first is right for even questions, the useful one for half of the odd ones."""
    right = {"first": question % 2 == 0, "useful": question % 4 == 1, "useless": False}
    return [
        LoggedAnswer(
            question=f"Who is {question}?", attempt=Attempt(text=f"{form} {question}", form=form), right=right[form]
        )
        for form in forms
    ]


def test_a_form_that_was_asked_on_easier_questions_is_not_taken_for_a_better_one() -> None:
    rows = [row for at in range(100) for row in answers(at, FORMS[:2])]
    rows += [row for at in range(100, 200, 2) for row in answers(at, ("first", "useless"))]  # the first is right there
    table = training_table(rows)
    p = np.array([0.5 + 0.4 * row.right for row in rows])
    assert greedy_order(table, p, FORMS, first="first", agreement=0.0) == list(FORMS)


def test_a_form_that_was_asked_twice_does_not_stand_for_two() -> None:
    twice = [*answers(0, ("first",)), *answers(0, ("first",)), *answers(1, FORMS[:2])]
    assert places_by_question(training_table(twice), FORMS[:2]) == [[2, 3]]
