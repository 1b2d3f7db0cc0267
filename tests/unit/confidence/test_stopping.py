"""Stopping: dearer calls are made less often, and a budget is kept on training questions."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.isotonic import IsotonicRegression

from query_mutator.confidence import (
    Attempt,
    LoggedAnswer,
    Stopping,
    answer_groups,
    answer_key,
    combined,
    greedy_order,
    places_by_question,
    plain_vote,
    rule_for_budget,
    rule_vote,
    stopping,
    training_table,
    vote,
)
from query_mutator.confidence.submission import submitted
from query_mutator.errors import CheckpointError, UsageError

FORMS = ("first", "useful", "useless")
SUM = "Tom has 12 apples and buys 30 more. How many apples does he have?"


def episodes(n: int, calls: int, seed: int = 0) -> list[list[float]]:
    rng = np.random.default_rng(seed)
    return np.maximum.accumulate(rng.beta(1, 2, (n, calls)), axis=1).tolist()


@pytest.mark.parametrize("calls", [1, 3])
def test_the_threshold_never_rises_with_the_price(calls: int) -> None:
    curve = Stopping.fit(episodes(300, calls))
    prices = np.linspace(0, 1, 60)
    thresholds = [curve.rule_for_price(price, max_calls=4).threshold for price in prices]
    assert thresholds == sorted(thresholds, reverse=True)
    assert thresholds[0] > 0.6
    assert thresholds[-1] == 0
    assert (np.diff(curve.gains) <= 0).all()


def test_a_call_is_made_exactly_while_its_gain_is_above_its_price() -> None:
    curve = Stopping.fit(episodes(300, 1))
    rule = curve.rule_for_price(0.1, max_calls=3)
    for p in np.linspace(0, 1, 101):
        assert rule.ask_again(p, calls=1) == (curve.gain(p) > 0.1 + 1e-12) or abs(p - rule.threshold) < 1e-9
    assert not rule.ask_again(0.0, calls=3)


@pytest.mark.parametrize(("budget", "most"), [(1.0, None), (1.5, None), (2.0, None), (2.5, 4), (3.0, 3)])
def test_a_budget_is_the_mean_number_of_calls(budget: float, most: int | None) -> None:
    paths = episodes(400, 5)
    rule = rule_for_budget(paths, budget, max_calls=most)
    made = []
    for path in paths:
        calls = 1
        while rule.ask_again(path[calls - 1], calls=calls):
            calls += 1
        made.append(calls)
    assert np.mean(made) == pytest.approx(budget, abs=0.01)


@pytest.mark.parametrize(("budget", "most"), [(0.5, 2), (3.0, 2), (float("nan"), 2)])
def test_a_budget_out_of_reach_is_an_error(budget: float, most: int) -> None:
    with pytest.raises(UsageError, match="calls"):
        rule_for_budget(episodes(10, 2), budget, max_calls=most)


def test_prices_and_episodes_are_checked() -> None:
    with pytest.raises(UsageError, match="cannot cost"):
        Stopping.fit(episodes(10, 1)).rule_for_price(-1, max_calls=2)
    with pytest.raises(UsageError, match="episodes"):
        Stopping.fit([])


def test_arrays_come_back_and_hostile_ones_are_refused() -> None:
    curve = Stopping.fit(episodes(60, 2))
    arrays = curve.to_arrays()
    assert Stopping.from_arrays(arrays).gain(0.3) == curve.gain(0.3)
    for broken in (arrays["stopping_gains"][::-1], arrays["stopping_gains"][:3], np.full(41, np.nan), np.full(41, 2.0)):
        with pytest.raises(CheckpointError):
            Stopping.from_arrays({**arrays, "stopping_gains": broken.copy()})


def test_pooled_gains_are_those_of_isotonic_regression() -> None:
    values = np.random.default_rng(0).normal(size=200) - np.linspace(0, 2, 200)
    known = IsotonicRegression(increasing=False).fit_transform(np.arange(200), values)
    assert stopping._falling(values) == pytest.approx(known)


def answers(question: int, forms: tuple[str, ...]) -> list[LoggedAnswer]:
    """Return answers of which the first is right for even questions, the useful one for half of the odd ones."""
    right = {"first": question % 2 == 0, "useful": question % 4 == 1, "useless": False}
    return [
        LoggedAnswer(
            question=f"Who is {question}?", attempt=Attempt(text=f"{form} {question}", form=form), right=right[form]
        )
        for form in forms
    ]


def test_a_form_that_was_asked_on_easier_questions_is_not_taken_for_a_better_one() -> None:
    rows = [row for at in range(100) for row in answers(at, FORMS[:2])]
    rows += [row for at in range(100, 200, 2) for row in answers(at, ("first", "useless"))]  # the first is right there
    table = training_table(rows)
    p = np.array([0.5 + 0.4 * row.right for row in rows])
    assert greedy_order(table, p, FORMS, first="first", agreement=0.0) == list(FORMS)


def test_a_form_that_was_asked_twice_does_not_stand_for_two() -> None:
    twice = [*answers(0, ("first",)), *answers(0, ("first",)), *answers(1, FORMS[:2])]
    assert places_by_question(training_table(twice), FORMS[:2]) == [[2, 3]]


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
