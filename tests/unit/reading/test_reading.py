"""What a reply says finally: refusals, families of names, numbers and other kinds, in linear time."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from query_mutator.reading import Gold, first_sentence, is_not_sure, is_refusal, read
from query_mutator.reading.gold import commits_to
from query_mutator.reading.values import numbers_in

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
DIGITS = ("digits", "How do you write sixty-seven in digits?", ["67"])
BEST = ("superlative", 'What is the superlative of "good"?', ["best"])
PEOPLE = ("demonym", "What do you call a person from Denmark?", ["Danish", "Dane"])
ITALIANS = ("demonym", "What are the people of Italy called?", ["Italian"])
CZECH = ("demonym", "What are the people of the Czech Republic called?", ["Czech"])
STATE = ("state_of_city", "In which US state is Tacoma?", ["Washington"])
Asked = tuple[str, str, list[str]]


@pytest.mark.parametrize(
    "text",
    [
        "I'm sorry, but I can't help with that request.",
        "I’m sorry, I cannot assist with that.",
        "Sorry, I won't do this.",
        "I am unable to help with this.",
        "I must decline.",
        "As an AI, I can't provide that.",
    ],
)
def test_refusals_are_seen(text: str) -> None:
    assert is_refusal(text)
    assert not is_not_sure(text)


@pytest.mark.parametrize(
    "text",
    [
        "`os.kill`: Kill a process with a signal.",
        "You can't index a set; use sorted() first.",
        "Use suppress: it means an error cannot stop the program.",
        "Sorry for the delay! `list.sort` sorts in place.",
        "You can't help with that kind of loop, so use a comprehension.",
    ],
)
def test_answers_are_no_refusals(text: str) -> None:
    assert not is_refusal(text)
    assert not is_not_sure(text)


def test_not_sure_is_its_own_verdict() -> None:
    assert is_not_sure("I'm not sure which function you mean.")
    assert is_not_sure("I don't know.")
    assert not is_refusal("I'm not sure which function you mean.")


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        (CAPITAL, "Nairobi"),
        (CAPITAL, "The capital of Kenya is Nairobi. It has four million people."),
        (CAPITAL, "Mombasa lies at the sea, but the answer is Nairobi."),
        (CAPITAL, "Not Kampala, which is in Uganda.\nAnswer: NAIROBI"),
        (CURRENCY, "Prices are in Canadian dollars."),
        (CONTINENT, "Peru is in South America."),
        (COUNTRY, "Malabo is the capital of Equatorial Guinea"),
        (SYMBOL, "The chemical symbol of iodine is I."),
        (SYMBOL, 'In chemistry iodine is written "I".'),
        (CODE, "The postal code is IN"),
        (CODE, "IN: Indiana\n\nThe post office is in Indiana."),
        (ELEMENT, "Na is Sodium."),
        (SUM, "42"),
        (SUM, "10 + 20 = 30 and 7 + 5 = 12, so 30 + 12 = 42"),
        (SUM, "30 and 12.\nAnswer: 42"),
        (DIFFERENCE, "To find 6 minus 1, we subtract 1 from 6. 6 - 1 = 5. So, 6 minus 1 equals 5."),
        (HALF, "We divide 80 by 2. 80 / 2 = 40\n\nSo, half of 80 is"),
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
        (CAPITAL, "The capital is Dodoma. No, Nairobi."),
        (CURRENCY, "US Dollar, Canadian Dollar, Euro"),
        (CONTINENT, "North America and South America"),
        (COUNTRY, "Guinea, Equatorial Guinea"),
        (COUNTRY, "Papua New Guinea"),
        (SYMBOL, 'It is "I" or "Io", maybe "In".'),
        (SYMBOL, "i"),
        (SYMBOL, "I: iodine, In: indium"),
        (CODE, "IN, ID, IA"),
        (ELEMENT, "sodium, potassium or nitrogen"),
        (SUM, "41 or 42"),
        (DIFFERENCE, "6 - 1 = 5 or 4"),
        (DIGITS, "The answer is sixty-seven."),
        (BEST, "better, best"),
        (PEOPLE, "Danish, Swedish or Norwegian"),
        (ITALIANS, "In Italian it is called a colloquialism."),
        (CZECH, "The people of the Czech Republic are called republicans."),
        (STATE, "Tacoma is in Washington, D.C."),
        (CONTINENT, "Peru lies on the South American and the African continent."),
        (CODE, 'The letters are "IN" and "IND".'),
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
    differences = [
        f"{row['id']}: {row['reply']!r}"
        for row in rows
        if commits_to(row["reply"], row["accept"], family=row["family"], question=row["question"]) != row["right"]
    ]
    assert len(rows) == 100
    assert len(differences) <= 3, "\n".join(differences)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("I can't", None),
        ("I can't.", None),  # "3." could become "3.14"
        ("I can't. So", "I can't."),
        ("我不能。So", "我不能。"),
        ("私にはできません", None),
        ("不行！", "不行！"),
        ("pi is 3.14 and so on", None),
        (" \n Title\nText", "Title\n"),
    ],
)
def test_a_first_sentence_is_one_that_something_follows(text: str, sentence: str | None) -> None:
    assert first_sentence(text) == sentence


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        ("So she has 42 apples.", "42", 1),
        ("#### 1,042", "1042", 1),
        ("The answer is $1,234.50, after 3 steps.", "1234.5", 1),
        ("First 10, then 20.", "10", 0),  # the last number counts
        ("the answer is 10; I used 2 steps", "10", 1),
        (r"Hence \boxed{\frac{3}{4}}.", "0.75", 1),
        ("It takes 1 1/2 hours", "1.5", 1),
        ("3/4 of them", "75%", 1),
        ("0.05", "5 %", 1),
        ("50 %", "5 %", 0),
        ("−3 degrees", "-3", 1),
        ("rows 10-12", "12", 0),  # a range is not one number
        ("3.2 million people", "3200000", 1),
        ("1.5e3 m", "1500", 1),
        ("12\u202f345 km", "12345", 1),
        ("about 3.14159", "3.14", 0),
        ("H2O and v2", "2", 0),  # digits within words
        ("1/0", "1", 0),
        ("none", "0", 0),
        ("I'm sorry, I can't help with 42.", "42", 0),
        ("42", "forty-two", 1),
        ("9" * 400, "9" * 401, 0),  # beyond a float: no number
    ],
)
def test_numbers(answer: str, gold: str, right: int) -> None:
    said = not is_refusal(answer) and Gold((gold,), "How many?").matches(answer)
    assert said == bool(right)


ROWS = [json.loads(line) for line in (LABELLED.parent / "replies/more_pairs.jsonl").read_text("utf8").splitlines()]
HOSTILE = (
    "9" * 401,
    "1/" + "9" * 401,
    "1e999",
    "10^99999",
    "(" * 20_000,
    "'\"" * 9_000,
    "\n" * 20_000,
    "\\boxed{",
    '{"answer": ',
)
PIECES = st.sampled_from([row["reply"] for row in ROWS] + [row["question"] for row in ROWS] + list(HOSTILE))


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(ROWS), st.lists(PIECES | st.text(), max_size=3), PIECES | st.text(), st.booleans())
def test_any_text_is_read(row: dict[str, Any], pieces: list[str], other: str, is_asked: bool) -> None:
    reply, question = " ".join(pieces), row["question"] if is_asked else other
    assert all(np.isfinite(number.value) for number in numbers_in(reply, words=True))
    for accept in (row["accept"], [other]):
        assert Gold(tuple(accept), question).matches(reply) in (True, False)
    for kind in ("letter", "number", "verdict", "date", "time"):
        read(reply, kind, question)
    assert is_refusal(reply) in (True, False)


@pytest.mark.parametrize(
    ("reply", "is_right"),
    [("17:00", True), ("At 5:00 p.m. (EST).", True), ("2 pm PST, so 5 pm EST", True), ("5 pm PST", False)],
)
def test_a_time_in_another_zone_is_another_time(reply: str, is_right: bool) -> None:
    assert Gold(("5 pm EST",), "When does the call start?").matches(reply) is is_right


@given(st.integers(-(10**12), 10**12))
def test_an_integer_is_read_in_every_spelling(value: int) -> None:
    for spelled in (f"{value}", f"{value:,}", f"It is {value}.", f"so ${value} in all", f"#### {value}"):
        assert Gold((str(value),), "How many?").matches(spelled)


HERE = Path(__file__).parent / "replies"
#: Rows that are read as they are labeled, at least; half of all would be as good as a coin, and the goal is 99 of 100.
#: Rules were made from all authors but the last two of eight, 300 rows each, weights of options from all.
READ = {"open": (477, 489), "more": (2121, 2216), "wide": (1487, 1536), "authors": (2159, 2400), "frozen": (476, 511)}
#: The weights of refusals are fitted to all rows but the frozen ones.
F1 = {"open": 0.99, "more": 0.99, "wide": 0.99, "authors": 0.99, "frozen": 0.96}


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
