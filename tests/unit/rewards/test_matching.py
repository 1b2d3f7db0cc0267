"""Exact, contains and numeric, on answers and gold judged by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from query_mutator.rewards import PARTS, Evidence
from query_mutator.rewards.matching import final_number, normalized, numbers_in
from query_mutator.types import NUMERIC, Question, Reward

UNIT = np.ones(1, dtype=np.float32)


def score(part: str, answer: str, *accept: str, tags: tuple[str, ...] = ()) -> float:
    evidence = Evidence(
        question=Question(id="q", text="?", accept=accept, tags=tags), rewrite="?", answer=answer,
        question_vector=UNIT, rewrite_vector=UNIT, answer_vector=UNIT,
    )  # fmt: skip
    value = PARTS.get(part)(evidence)
    assert isinstance(value, float)
    return value


@pytest.mark.parametrize(
    ("answer", "accept", "exact", "contains"),
    [
        ("The  Eiffel Tower.", ("eiffel tower",), 1, 1),
        ("It is the Eiffel Tower!", ("Eiffel Tower",), 0, 1),
        ("Eiffel's tower", ("Eiffel Tower",), 0, 0),
        ("Parisian", ("Paris",), 0, 0),
        ("paris", ("London", "Paris"), 1, 1),
        ("I'm sorry, but I can't help with Paris.", ("Paris",), 0, 0),
        ("The", ("An",), 0, 0),  # articles alone do not all become the same empty text
        ("", ("Paris",), 0, 0),
        ("Paris", (), 0, 0),
    ],
)
def test_texts(answer: str, accept: tuple[str, ...], exact: int, contains: int) -> None:
    assert (score("exact", answer, *accept), score("contains", answer, *accept)) == (exact, contains)


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        ("So she has 42 apples.", "42", 1),
        ("6 * 7 = 42.", "42", 1),
        ("#### 1,042", "1042", 1),
        ("The answer is $1,234.50, after 3 steps.", "1234.5", 1),
        ("First 10, then 20.", "10", 0),  # the last number counts
        ("the answer is 10; I used 2 steps", "10", 1),
        (r"Hence \boxed{\frac{3}{4}}.", "0.75", 1),
        ("It takes 1 1/2 hours", "1.5", 1),
        ("3/4 of them", "75%", 1),
        ("5 percent", "5", 1),
        ("0.05", "5 %", 1),
        ("50 %", "5 %", 0),
        ("−3 degrees", "-3", 1),
        ("between 10-12", "12", 1),  # a range is not a negative number
        ("3.2 million people", "3200000", 1),
        ("1.5e3 m", "1500", 1),
        ("12 345", "12345", 0),  # a plain space separates numbers
        ("12\u202f345 km", "12345", 1),
        ("about 3.14159", "3.14", 0),
        ("H2O and v2", "2", 0),  # digits within words
        ("1/0", "1", 0),
        ("none", "0", 0),
        ("I'm sorry, I can't help with 42.", "42", 0),
        ("42", "forty-two", 0),
        ("9" * 400, "9" * 401, 0),  # beyond a float: no number
    ],
)
def test_numbers(answer: str, gold: str, right: int) -> None:
    assert score("numeric", answer, gold) == right
    assert score("right", answer, gold, tags=(NUMERIC,)) == right


def test_the_first_part_that_says_right_or_wrong_is_the_success() -> None:
    assert Reward(score=0.5, parts={"similarity": 0.2, "numeric": 1.0, "contains": 0.0}).success == 1.0
    assert Reward(score=0.5, parts={"similarity": 0.2}).success == 0.0


@given(st.text())
def test_any_text_is_normalized_and_read(text: str) -> None:
    assert normalized(text) == " ".join(normalized(text).split())
    assert normalized(text) == " ".join(normalized(text).split())
    assert all(np.isfinite(number.value) for number in numbers_in(text))
    final_number(text)


@given(st.integers(-(10**12), 10**12))
def test_an_integer_is_read_in_every_spelling(value: int) -> None:
    for spelled in (f"{value}", f"{value:,}", f"It is {value}.", f"so ${value} in all", f"#### {value}"):
        found = final_number(spelled)
        assert found is not None
        assert found.value == value


@pytest.mark.parametrize("text", ["1," * 20_000, "9" * 20_000, "1/" * 10_000, "$" * 20_000, "1 " * 10_000 + "/"])
def test_long_texts_are_read_at_once(text: str) -> None:
    numbers_in(text)
