"""The reward part `verifier`, by the scorers of reasoning-gym: right replies, wrong ones, lists of guesses, code."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from query_mutator.data.reasoning_gym import entry_of, verified_questions
from query_mutator.rewards import PARTS, Evidence, Unscored, WeightedReward
from query_mutator.rewards.verifier import answer_in, is_harmless, verified
from query_mutator.types import Question, success_in

EAST = np.array([1.0, 0.0], dtype=np.float32)
#: Tasks of arithmetic, algebra, algorithms, logic, graphs, games, geometry, cognition and code.
TASKS = (
    "basic_arithmetic", "chain_sum", "gcd", "gsm_symbolic", "simple_equations", "simple_integration",
    "complex_arithmetic", "letter_counting", "spell_backward", "word_sorting", "caesar_cipher", "string_insertion",
    "spiral_matrix", "syllogism", "zebra_puzzles", "propositional_logic", "family_relationships", "shortest_path",
    "countdown", "mini_sudoku", "simple_geometry", "number_sequence", "needle_haystack", "bf",
)  # fmt: skip
JUNK = (
    "",
    " ",
    "I don't know.",
    "{}",
    "[[",
    "×××",
    "a=b=c",
    "1/0",
    "No",
    "\x00",
    "9" * 5000,
    "(" * 300,
    "<answer></answer>",
)


@pytest.fixture(autouse=True)
def package() -> None:
    pytest.importorskip("reasoning_gym")


@cache
def questions_of(task: str) -> list[Question]:
    return verified_questions(f"reasoning-gym:{task}(size=4,seed=11)")


def evidence(question: Question, answer: str) -> Evidence:
    return Evidence(
        question=question,
        rewrite=question.text,
        answer=answer,
        question_vector=EAST,
        rewrite_vector=EAST,
        answer_vector=EAST,
    )


@pytest.mark.parametrize("task", TASKS)
def test_an_accepted_answer_is_right_and_another_entrys_is_not(task: str) -> None:
    questions = questions_of(task)
    for question, other in zip(questions, [*questions[1:], questions[0]], strict=True):
        for reply in JUNK:
            assert 0 <= verified(question, reply) < 1 or reply in question.accept
        for answer in question.accept:
            assert verified(question, answer) == 1
            assert verified(question, f"Let me think.\n<answer> {answer} </answer>") == 1
        for answer in other.accept:
            assert verified(question, answer) < 1 or answer in question.accept


@pytest.mark.parametrize("task", ["basic_arithmetic", "gsm_symbolic", "letter_counting", "spell_backward", "syllogism"])
def test_a_list_of_guesses_is_not_right(task: str) -> None:
    for question in questions_of(task):
        gold = question.accept[0]
        guesses = (
            [str(number) for number in range(900, 903)] if gold.lstrip("-").isdecimal() else ["Yes", "No", "ecila"]
        )
        for reply in (f"{gold}, {', '.join(guesses)}", f"{guesses[0]} or {gold}", "\n".join([*guesses, gold])):
            assert success_in({"verifier": verified(question, reply)}) == 0, reply
            assert success_in({"verifier": verified(question, f"<answer>{reply}</answer>")}) == 0, reply


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("The sum is 1,234.", "1234"),
        ("12 + 30 = 42", "42"),
        ("12 + 30 = 42.\n42 is the sum of 12 and 30", "42"),
        ("The answer is **-7**.", "-7"),
        ("Answer: 7 or 8", ""),
        ("<answer>3.50</answer> 9", "3.50"),
        ("12", "12"),
        ("12 and 30", ""),
        ("The larger of 12 and 30 is 30.", "30"),
        ("1/6", ""),
        ("It is v2", ""),
        ("forty-two", ""),
    ],
)
def test_the_number_that_a_reply_commits_to(reply: str, answer: str) -> None:
    entry = entry_of(questions_of("chain_sum")[0])
    assert answer_in(reply, entry, question="What is 12 + 30?") == answer


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("Yes.", "Yes"),
        ("  **No**\n", "No"),
        ("The final answer is: Yes.", "Yes"),
        ('Answer: "olleh"', "olleh"),
        ("Mr. Smith goes.", "Mr. Smith goes."),
        ("No, it does not follow that no tigers are birds.", "No"),
        ("Yes, no", "Yes, no"),
        ("No. Yes.", "No. Yes."),
        ("Yes or no", "Yes or no"),
        ("The day is Sunday. It follows Saturday.", "Sunday"),
        ("It is Sunday. It is Monday.", "It is Sunday. It is Monday."),
        ("so <answer>a.</answer>", "a."),
    ],
)
def test_the_bare_text_of_a_reply(reply: str, answer: str) -> None:
    assert answer_in(reply, entry_of(questions_of("syllogism")[0]), question="") == answer


SYMPY, EVAL = {"parse_expr"}, {"eval"}


@pytest.mark.parametrize(
    ("code", "run_by"),
    [
        ("().__class__.__base__.__subclasses__()", SYMPY),
        ("__import__('os').system('true')", EVAL),
        ("open('x', 'w')", EVAL),
        ("[c for c in 'ab']", EVAL),
        ("9**9**9", SYMPY),
        ("(9**64)**64", SYMPY),
        ("1 << 99999", SYMPY),
        ("99999999!", SYMPY),
        ("factorial(99999999)", SYMPY),
        ("exp(exp(exp(9)))", SYMPY),
        ("'a' * 10**9", EVAL),
        ("1e999999999", {"Fraction"}),
    ],
)
def test_code_in_an_answer_is_not_run(code: str, run_by: set[str]) -> None:
    assert not is_harmless(code, run_by=run_by)


@pytest.mark.parametrize(
    ("code", "run_by"),
    [
        ("-9*x**8/10 + 3*x**4/2 + C", SYMPY),
        ("exp(x)*sin(sqrt(x**2 + 1))", SYMPY),
        ("82 + 20 + 67 - 50", SYMPY),
        ("3/4", {"Fraction"}),
        ("[['1', '2'], ['3', '4']]", EVAL),
        ("2 3 8 1", EVAL),
        ("CADDBAAADECA", EVAL),
    ],
)
def test_answers_that_tasks_ask_for_are_read(code: str, run_by: set[str]) -> None:
    assert is_harmless(code, run_by=run_by)


def test_partial_credit_is_a_score_but_not_right() -> None:
    question = questions_of("word_sorting")[0]
    words = question.accept[0].split(", ")
    swapped = ", ".join([words[1], words[0], *words[2:]])
    reward = WeightedReward.parse("verifier")(evidence(question, swapped))
    assert 0 < reward.score < 1
    assert (reward.success, WeightedReward()(evidence(question, swapped)).parts["right"]) == (0, 0)
    right = evidence(question, question.accept[0])
    assert (WeightedReward.parse("verifier")(right).success, WeightedReward()(right).parts["right"]) == (1, 1)


def test_what_a_scorer_prints_stays_out_of_the_output(capsys: pytest.CaptureFixture[str]) -> None:
    for question in questions_of("tower_of_hanoi"):
        assert verified(question, "Move disk 1 from Peg 9 to Peg 2") == 0
    assert capsys.readouterr().out == ""


def test_a_question_of_another_set_is_unscored() -> None:
    with pytest.raises(Unscored, match="not of --dataset reasoning-gym:NAME or verifiers:PACKAGE"):
        PARTS.get("verifier")(evidence(Question(id="q", text="2 + 2?", accept=("4",)), "4"))
