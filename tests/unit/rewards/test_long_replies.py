"""Answers in long replies."""

from __future__ import annotations

from query_mutator.rewards.matching import final_number


def test_the_first_number_after_the_mark_counts_however_much_follows() -> None:
    found = final_number("The answer is 42. " + "and so on " * 3000 + "7")
    assert found is not None
    assert found.value == 42
