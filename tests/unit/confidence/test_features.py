"""Columns of a reply by example, and the equations in it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from query_mutator.confidence import Attempt
from query_mutator.confidence.features import FEATURES, equations_in, feature_row
from query_mutator.confidence.model import GROUPS

QUESTION = "Tom has 12 apples and buys 30 more. How many apples does he have?"


def columns(text: str, question: str = QUESTION, **fields: object) -> dict[str, float]:
    row = feature_row(question, Attempt(text=text, **fields), kind="number")
    assert row.shape == (len(FEATURES),)
    return dict(zip(FEATURES, row.tolist(), strict=True))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("12 + 30 = 42. So he has 42 apples.",
         {"equations": 1, "wrong_equations": 0, "answer_is_result": 1, "answer_in_question": 0, "given_unused": 0,
          "concludes": 1, "unfinished": 0, "unknown_operands": 0}),
        ("12 + 30 = 44. So he has 44 apples.", {"wrong_equations": 1, "wrong_share": 1, "last_adds_up": 0}),
        ("He has 12 apples.", {"answer_in_question": 1, "equations": 0, "last_adds_up": math.nan}),
        ("12 + 17 = 29 apples.", {"unknown_operands": 1, "given_unused": 1}),
        ("To find this we add all of the apples that he has to the ones he buys and", {"unfinished": 1}),
        ("How many apples did he buy?", {"ends_in_question": 1, "question_marks": 1, "answer_size": math.nan}),
        ("Maybe it is about 42, I think.", {"hedges": 3}),
        ("I'm sorry, I cannot help with that.", {"refuses": 1, "has_key": 0}),
        ("he has he has he has he has", {"repeated_phrases": 2 / 3}),
        ("12 - 30 = -18", {"answer_is_negative": 1, "negative_results": 1}),
        ("42.5", {"answer_is_whole": 0, "answer_decimals": 1, "unfinished": 0}),
        ("", {"numbers": 0, "chars": 0, "has_key": 0}),
    ],
)  # fmt: skip
def test_columns_by_example(text: str, expected: dict[str, float]) -> None:
    found = columns(text)
    assert {name: found[name] for name in expected} == pytest.approx(expected, nan_ok=True)


def test_what_is_not_known_is_nan_and_what_is_known_is_kept() -> None:
    assert all(math.isnan(columns("42")[name]) for name in ("cut", "logprob", "form", "closeness", "echoes_context"))
    found = columns("Paris, as in the example.", cut=True, logprob=-0.5, context="Q: Capital of Italy? Example: Rome")
    assert (found["cut"], found["logprob"]) == (1, -0.5)
    assert found["echoes_context"] == pytest.approx(0.5)  # of paris and example


@pytest.mark.timeout(5)  # a tenth of a second; where each blank line is read with all after it: nine
@pytest.mark.parametrize(
    "text",
    [
        *("∞ ² ½ ١٢ 1e308 x 1e308 = 1e400", "\x00\ud800", "9" * 5_000, "=" * 5_000, "- " * 5_000),
        *("x" + "\n" * 20_000 + "42", "\n=" * 20_000, " " * 40_000),
    ],
)
def test_any_text_has_columns_without_infinities(text: str) -> None:
    assert not np.isinf(feature_row(text, Attempt(text=text), kind="words")).any()
    assert not np.isinf(feature_row(text, Attempt(text=text), kind="number")).any()


def test_every_column_is_in_one_group_of_explanations() -> None:
    assert sorted(name for group in GROUPS for name in group) == sorted(FEATURES)


@pytest.mark.parametrize(
    ("text", "verdicts"),
    [
        ("24 / 2 = 12", [True]),
        ("$12/hour x 0.83 hours = $9.96", [True]),
        ("10 + 18 x 0.25 = 4.5", [False]),
        ("Total value of bills = $20 + $60 = $80", [True]),
        ("= 220 liters x (1 - 0.10)\n= 220 liters x 0.90\n= 198 liters", [True, True]),
        ("10% of 200 = 20", [True]),
        ("3/4 of 8 = 6", [True]),
        ("48/2 = <<48/2=24>>24 clips", [True]),
        ("67 ÷ 3 = 22.33", [True]),
        ("3 shirts at $4 each and 2 shoes = 3 x 4 = 12", [True]),
        ("7 gallons / 16 pints per gallon = 460 pints, and 2 + 2 = 4", [False, True]),
        ("x + 2 + 3 = 10", []),
        ("2x + 3 = 13", []),
        ("a == b, 3 <= 4, 1 / 0 = 7", []),
        ("((((((1 + 2 = 3", []),
        ("", []),
    ],
)
def test_equations_add_up_or_not(text: str, verdicts: list[bool]) -> None:
    assert [equation.adds_up for equation in equations_in(text)] == verdicts


def test_an_equation_has_its_numbers() -> None:
    (equation,) = equations_in("He pays 3 x $4 + 2 = $14.")
    assert (equation.operands, equation.operators, equation.result) == ((3.0, 4.0, 2.0), "*+", 14.0)


@pytest.mark.parametrize(
    "text", ["(" * 20_000 + "= 1", "1 + " * 9_000 + "= 2", "1 = " * 9_000, "9" * 20_000 + " + 1 = 2"]
)
def test_long_texts_are_read_in_bounds(text: str) -> None:
    assert len(equations_in(text)) <= 200
