"""How well graders read replies and refusals graded one by one; the frozen parts are not looked at."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from query_mutator.reading import Gold, is_refusal

HERE = Path(__file__).parent / "replies"
#: Rows that are read as they are labeled, at least; half of all would be as good as a coin, and the goal is 99 of 100.
READ = {"open": (470, 489), "more": (2090, 2216), "wide": (1435, 1536), "frozen": (460, 511)}
F1 = {"open": 0.97, "more": 0.97, "wide": 0.97, "frozen": 0.93}


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (HERE / name).read_text(encoding="utf-8").splitlines()]


def graded(row: dict[str, Any]) -> bool:
    return Gold(tuple(row["accept"]), row["question"]).matches(row["reply"])


@pytest.mark.parametrize("half", sorted(READ))
def test_replies_are_graded_no_worse_than_before(half: str) -> None:
    pairs = rows(f"{half}_pairs.jsonl")
    wrong = Counter(row["kind"] for row in pairs if graded(row) != row["right"])
    least, count = READ[half]
    assert len(pairs) == count
    assert count - wrong.total() >= least, wrong


@pytest.mark.parametrize("half", sorted(F1))
def test_refusals_are_found_no_worse_than_before(half: str) -> None:
    found = Counter((row["refusal"], is_refusal(row["reply"])) for row in rows(f"{half}_refusals.jsonl"))
    f1 = 2 * found[True, True] / (2 * found[True, True] + found[True, False] + found[False, True])
    assert f1 >= F1[half], found
