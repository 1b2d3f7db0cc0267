"""Equations by example: units, chains, percentages, and what is no equation."""

from __future__ import annotations

import pytest

from query_mutator.confidence.features import equations_in


@pytest.mark.parametrize(
    ("text", "verdicts"),
    [
        ("24 / 2 = 12", [True]),
        ("7 x 6 = 42 stickers used in total.", [True]),
        ("$12/hour x 0.83 hours = $9.96", [True]),
        ("10 + 18 x 0.25 = 4.5", [False]),
        ("Total value of bills = $20 + $60 = $80", [True]),
        ("= 220 liters x (1 - 0.10)\n= 220 liters x 0.90\n= 198 liters", [True, True]),
        ("10% of 200 = 20", [True]),
        ("3/4 of 8 = 6", [True]),
        ("1,000 - 3 = 997.", [True]),
        ("12 - 15 = -3", [True]),
        ("48/2 = <<48/2=24>>24 clips", [True]),
        ("67 ÷ 3 = 22.33", [True]),
        ("3 shirts at $4 each and 2 shoes = 3 x 4 = 12", [True]),
        ("7 gallons / 16 pints per gallon = 460 pints, and 2 + 2 = 4", [False, True]),
        ("x + 2 + 3 = 10", []),
        ("5x = 20", []),
        ("2x + 3 = 13", []),
        ("$5 + E = 37", []),
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
