"""The grader of `general`: a committed answer is right, a list of guesses or a copy of the question is not."""

from __future__ import annotations

import pytest

from query_mutator.rewards.committed import commits_to

CAPITAL = ("capital", "What is the capital of Kenya?", ["Nairobi"])
CURRENCY = ("currency", "What is the currency of Canada?", ["Canadian Dollar", "Dollar"])
CONTINENT = ("continent", "On which continent is Peru?", ["South America"])
COUNTRY = ("country_of_capital", "Which country has Malabo as its capital?", ["Equatorial Guinea"])
SYMBOL = ("symbol", "What is the chemical symbol of iodine?", ["I"])
CODE = ("state_code", "What is the two-letter postal code of Indiana?", ["IN"])
ELEMENT = ("element", "Which element has the chemical symbol Na?", ["sodium"])
SUM = ("sum", "What is 17 plus 25?", ["42"])
UNITS = ("units", "How many minutes are in 3 hours?", ["180"])
PAST = ("past", 'What is the past tense of "go"?', ["went"])
WEEKDAY = ("weekday_abroad", "What is Monday in French?", ["lundi"])
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
        (CODE, "The postal code is IN"),
        (ELEMENT, "Na is Sodium."),
        (SUM, "42"),
        (SUM, "17 + 25 = 42"),
        (SUM, "10 + 20 = 30 and 7 + 5 = 12, so 30 + 12 = 42"),
        (SUM, "30 and 12.\nAnswer: 42"),
        (UNITS, "There are 60 minutes in an hour, so 3 x 60 = 180 minutes."),
        (PAST, 'The past tense of "go" is "went".'),
        (WEEKDAY, "Monday in French is Lundi."),
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
        (CODE, "IN, ID, IA"),
        (ELEMENT, "sodium, potassium or nitrogen"),
        (SUM, "41 or 42"),
        (SUM, "40 41 42 43 44"),
        (UNITS, "120, 180 or 240"),
        (PAST, "goed, went"),
        (WEEKDAY, "lundi, mardi, mercredi"),
        (CAPITAL, "What is the capital of Kenya?"),
        (SUM, "17 plus 25"),
        (CAPITAL, ""),
    ],
)
def test_a_list_a_copy_or_another_answer_is_wrong(asked: Asked, answer: str) -> None:
    family, question, accept = asked
    assert not commits_to(answer, accept, family=family, question=question)
