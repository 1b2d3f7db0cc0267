"""Answers in long replies."""

from __future__ import annotations

import pytest

from query_mutator.rewards.matching import decided, final_number


def test_the_first_number_after_the_mark_counts_however_much_follows() -> None:
    found = final_number("The answer is 42. " + "and so on " * 3000 + "7")
    assert found is not None
    assert found.value == 42


@pytest.mark.timeout(20)  # each blank line once, where every one was read with all after it: minutes
def test_blank_lines_are_read_once() -> None:
    text = "\n" * 200_000 + "42"
    assert decided(text) == text
    assert decided("\n\n Answer: 42\n7") == "42"
