"""What counts as the same answer, votes, and P(right) given the other answers."""

from __future__ import annotations

import numpy as np
import pytest

from query_mutator.confidence import Attempt, answer_groups, answer_key, combined, plain_vote, rule_vote, vote
from query_mutator.confidence.submission import submitted

SUM = "Tom has 12 apples and buys 30 more. How many apples does he have?"


@pytest.mark.parametrize(
    ("question", "answers", "groups"),
    [
        (SUM, ["42", "He has 42.0 apples.", "12 + 30 = 42.\nAnswer: 42", "43", "no idea", "none"], [0, 0, 0, 1, 2, 3]),
        (SUM, ["$1,000", "1000", "-0", "0"], [0, 0, 1, 1]),
        ("Is Paris in France?", ["Yes, it is.", "yes", "True.", "No.", "False"], [0, 0, 0, 1, 1]),
        ("Which? (A) red (B) blue", ["B", "(B) blue", "The answer is B.", "I choose (A)", "both"], [0, 0, 0, 1, 2]),
        ("What is the capital of France?", ["Paris", "The capital of France is Paris.", "It is **Paris**!", "Lyon"],
         [0, 0, 0, 1]),
        ("Who wrote Emma?", ["", "", "Jane Austen"], [0, 1, 2]),
    ],
)  # fmt: skip
def test_answers_that_say_the_same_are_one_group(question: str, answers: list[str], groups: list[int]) -> None:
    assert answer_groups(question, answers) == groups


def test_close_meanings_are_one_group_with_an_encoder() -> None:
    rows = np.array([[1.0, 0.0], [0.99, 0.14], [0.0, 1.0]], dtype=np.float32)
    answers = ["rain clouds", "wet weather", "sunshine"]
    assert answer_groups("What comes?", answers, kind="words") == [0, 1, 2]
    assert answer_groups("What comes?", answers, kind="words", rows=rows) == [0, 0, 1]


def test_the_marked_number_or_the_last_one_is_read() -> None:
    text = "The answer is 42. That is 30 more than before."
    assert (answer_key(text, "number"), answer_key(text, "last_number")) == ("42", "30")


def test_a_vote_takes_the_heaviest_group_and_its_heaviest_answer() -> None:
    assert vote([0, 1, 1]) == 1
    assert vote([0, 1, 2]) == 0
    assert vote([0, 1, 1], [0.5, 0.1, 0.3]) == 0
    assert vote([0, 1, 1], [0.3, 0.1, 0.3]) == 2
    with pytest.raises(ValueError, match="no answer"):
        vote([])


def test_a_plain_vote_skips_replies_without_an_answer_and_the_rule_those_that_end_wrong() -> None:
    texts = ["no idea", "Is it 12?", "He buys 30.", "42 apples", "12"]
    attempts = [Attempt(text=text) for text in texts]
    assert plain_vote(SUM, attempts) == 1
    assert plain_vote(SUM, attempts[:1]) == 0
    assert rule_vote(SUM, attempts) == 3
    assert rule_vote(SUM, attempts[:3]) == 1
    assert rule_vote(SUM, [Attempt(text="41", cut=True), Attempt(text="42")]) == 1


def test_answers_that_agree_support_each_other_and_others_contradict() -> None:
    p = np.array([0.5, 0.5, 0.5])
    agree, mixed = combined(p, [0, 0, 0]), combined(p, [0, 0, 1])
    assert agree == pytest.approx([7 / 8] * 3)
    assert mixed == pytest.approx([3 / 5, 3 / 5, 1 / 5])  # odds 3 and 1 against none
    assert combined(p, [0, 0, 1], agreement=0.0) == pytest.approx([1 / 3] * 3)
    assert combined(np.array([0.3]), [0]) == pytest.approx([0.3])
    assert combined(np.array([1.0, 0.0]), [0, 1]).sum() <= 1


def test_the_likeliest_group_is_submitted_by_its_likeliest_answer() -> None:
    assert submitted(np.array([0.6, 0.5, 0.4]), [0, 1, 1]) == 1
    assert submitted(np.array([0.6, 0.5, 0.4]), [0, 1, 1], agreement=0.0) == 0
    assert submitted(np.array([0.5, 0.5]), [0, 1]) == 0


def test_sure_answers_that_agree_are_surer_however_many_they_are() -> None:
    with np.errstate(over="raise", invalid="raise"):
        found = combined(np.full(60, 1 - 1e-9), [0] * 59 + [1], agreement=10.0)
    assert found[0] == pytest.approx(1.0)
    assert found[-1] == pytest.approx(0.0)
    assert combined(np.array([0.5, 0.5]), [0, 1]) == pytest.approx([1 / 3, 1 / 3])
