"""The grader of `general`: a committed answer is right, a list of guesses or a copy of the question is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from query_mutator.rewards.committed import FAMILY, commits_to, committed
from query_mutator.rewards.parts import Evidence
from query_mutator.types import Question

LABELLED = Path(__file__).with_name("labelled_replies.jsonl")

CAPITAL = ("capital", "What is the capital of Kenya?", ["Nairobi"])
CURRENCY = ("currency", "What is the currency of Canada?", ["Canadian Dollar", "Dollar"])
CONTINENT = ("continent", "On which continent is Peru?", ["South America"])
COUNTRY = ("country_of_capital", "Which country has Malabo as its capital?", ["Equatorial Guinea"])
SYMBOL = ("symbol", "What is the chemical symbol of iodine?", ["I"])
CODE = ("state_code", "What is the two-letter postal code of Indiana?", ["IN"])
ELEMENT = ("element", "Which element has the chemical symbol Na?", ["sodium"])
SUM = ("sum", "What is 17 plus 25?", ["42"])
DIFFERENCE = ("difference", "What is 6 minus 1?", ["5"])
HALF = ("half", "What is half of 80?", ["40"])
BEST = ("superlative", 'What is the superlative of "good"?', ["best"])
PEOPLE = ("demonym", "What do you call a person from Denmark?", ["Danish", "Dane"])
ITALIANS = ("demonym", "What are the people of Italy called?", ["Italian"])
CZECH = ("demonym", "What are the people of the Czech Republic called?", ["Czech"])
STATE = ("state_of_city", "In which US state is Tacoma?", ["Washington"])
Asked = tuple[str, str, list[str]]


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        (CAPITAL, "Nairobi"),
        (CAPITAL, "The capital of Kenya is Nairobi. It has four million people."),
        (CAPITAL, "Mombasa lies at the sea, but the answer is Nairobi."),
        (CAPITAL, "Not Kampala, which is in Uganda.\nAnswer: NAIROBI"),
        (CURRENCY, "Prices are in Canadian dollars."),
        (CURRENCY, "the dollar"),
        (CONTINENT, "Peru is in South America."),
        (COUNTRY, "Malabo is the capital of Equatorial Guinea"),
        (SYMBOL, "I"),
        (SYMBOL, "The chemical symbol of iodine is I."),
        (SYMBOL, 'In chemistry iodine is written "I".'),
        (SYMBOL, "The element iodine has the symbol I."),
        (CODE, "The postal code is IN"),
        (CODE, "IN: Indiana\n\nThe post office is in Indiana."),
        (CODE, "IN\n\nIndiana is a state."),
        (ELEMENT, "Na is Sodium."),
        (SUM, "42"),
        (SUM, "17 + 25 = 42"),
        (SUM, "10 + 20 = 30 and 7 + 5 = 12, so 30 + 12 = 42"),
        (SUM, "30 and 12.\nAnswer: 42"),
        (DIFFERENCE, "To find 6 minus 1, we subtract 1 from 6. 6 - 1 = 5. So, 6 minus 1 equals 5."),
        (HALF, "We divide 80 by 2. 80 / 2 = 40\n\nSo, half of 80 is"),
        (HALF, "To find half of 80, divide 80 by 2. Half of 80 is 40."),
        (BEST, 'The superlative of "good" is "best".'),
        (PEOPLE, "People from Denmark are called Danes."),
        (PEOPLE, "They are called Danish, or danois in French."),
        (CONTINENT, "Peru is on the South American continent."),
        (CODE, "The two letters of Indiana (USA) are IN."),
    ],
)
def test_a_committed_answer_is_right(asked: Asked, answer: str) -> None:
    family, question, accept = asked
    assert commits_to(answer, accept, family=family, question=question)


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        (CAPITAL, "Nairobi, Kampala, Dodoma"),
        (CAPITAL, "1. Nairobi\n2. Lusaka\n3. Harare"),
        (CAPITAL, "It is Nairobi or Addis Ababa."),
        (CAPITAL, "The capital is Dodoma. No, Nairobi."),
        (CURRENCY, "US Dollar, Canadian Dollar, Euro"),
        (CURRENCY, "dollar / pound / yen"),
        (CONTINENT, "North America and South America"),
        (CONTINENT, "Africa, Asia, Europe, South America, Oceania"),
        (COUNTRY, "Guinea, Equatorial Guinea"),
        (COUNTRY, "Papua New Guinea"),
        (SYMBOL, "I, In, Ir"),
        (SYMBOL, 'It is "I" or "Io", maybe "In".'),
        (SYMBOL, "i"),
        (SYMBOL, "I: iodine, In: indium"),
        (SYMBOL, "I\nIn\nIr"),
        (CODE, "IN, ID, IA"),
        (ELEMENT, "sodium, potassium or nitrogen"),
        (SUM, "41 or 42"),
        (SUM, "40 41 42 43 44"),
        (DIFFERENCE, "6 - 1 = 5 or 4"),
        (HALF, "20, 40 or 160"),
        (BEST, "better, best"),
        (PEOPLE, "Danish, Swedish or Norwegian"),
        (ITALIANS, "In Italian it is called a colloquialism."),
        (CZECH, "The people of the Czech Republic are called republicans."),
        (STATE, "Tacoma is in Washington, D.C."),
        (STATE, "Washington or Idaho"),
        (CONTINENT, "Peru lies on the South American and the African continent."),
        (CODE, 'The letters are "IN" and "IND".'),
        (ELEMENT, "sodium or plutonium"),
        (CAPITAL, "Mombasa or Nairobi"),
        (CAPITAL, "What is the capital of Kenya?"),
        (SUM, "17 plus 25"),
        (CAPITAL, ""),
    ],
)
def test_a_list_a_copy_or_another_answer_is_wrong(asked: Asked, answer: str) -> None:
    family, question, accept = asked
    assert not commits_to(answer, accept, family=family, question=question)


def test_the_grader_agrees_with_labels_by_hand() -> None:
    """100 replies of SmolLM2-135M, drawn over all families and labelled before they were graded."""
    rows = [json.loads(line) for line in LABELLED.read_text(encoding="utf8").splitlines()]
    differences = [f"{row['id']}: {row['reply']!r}" for row in rows if graded(row) != row["right"]]
    assert len(rows) == 100
    assert len(differences) <= 3, "\n".join(differences)


def graded(row: dict[str, Any]) -> bool:
    """Return whether the reward part calls a labelled reply right."""
    tags = (f"{FAMILY}{row['family']}",)
    question = Question(id=row["id"], text=row["question"], accept=tuple(row["accept"]), tags=tags)
    nowhere = np.zeros(1, dtype=np.float32)
    evidence = Evidence(
        question=question,
        rewrite=question.text,
        answer=row["reply"],
        question_vector=nowhere,
        rewrite_vector=nowhere,
        answer_vector=nowhere,
    )
    return committed(evidence) == 1.0
