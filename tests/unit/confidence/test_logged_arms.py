"""The benchmark on logs; when to stop, in which order forms are asked, and which answer is submitted."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import cascades, logged_arms
from query_mutator.cli.console import exit_code
from query_mutator.confidence import (
    Attempt,
    LoggedAnswer,
    answer_groups,
    answer_key,
    combined,
    greedy_order,
    places_by_question,
    plain_vote,
    training_table,
    vote,
)
from query_mutator.confidence.features import FEATURES
from query_mutator.confidence.gain import GainModel, gain_inputs
from query_mutator.confidence.submission import submitted
from query_mutator.errors import CheckpointError
from tests.unit.confidence.arithmetic_world import write_logs, write_rows

FORMS = ("first", "useful", "useless")
SUM = "Tom has 12 apples and buys 30 more. How many apples does he have?"


def run(*arguments: object) -> int:
    return exit_code(logged_arms.main, [str(argument) for argument in arguments], prog="logged_arms")


@pytest.mark.parametrize("texts", [("steps",), ("plain", "steps", "short")])
def test_learned_submission_beats_the_vote(tmp_path: Path, texts: tuple[str, ...], capsys: Any) -> None:
    logs = write_logs(tmp_path / "logs", train=150, test=120, texts=texts)
    assert run("--logs", logs, "--json", tmp_path / "result.json", "--refits", 1) == 0
    result = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert result["n"] == 120
    assert result["learned"]["3"] > result["vote"]["3"]
    assert result["learned"]["1"] <= result["learned"]["1.5"] <= min(result["learned"]["2"], result["learned"]["3"])
    assert result["learned"]["3"] == result["learned"]["6"]  # there are three prompts
    assert 1.35 < result["mean_calls"]["1.5"] < 1.65
    assert set(result["learned"]) == set(result["vote"]) == {"1", "1.5", "2", "3", "6"}
    out = capsys.readouterr().out
    assert "prompts steps" in out if texts == ("steps",) else "| 3 |" in out


def test_the_test_part_is_not_read_for_choices(tmp_path: Path, capsys: Any) -> None:
    logs = write_logs(tmp_path / "logs", train=120, test=30, texts=("plain",))
    assert run("--logs", logs, "--train-only") == 0
    first = capsys.readouterr().out
    rows = [json.loads(line) for line in gzip.decompress((logs / "logs.jsonl.gz").read_bytes()).splitlines()]
    write_rows(logs, [row for row in rows if row["part"] == "train"])
    assert run("--logs", logs, "--train-only") == 0
    assert capsys.readouterr().out == first


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


def test_a_plain_vote_skips_replies_without_an_answer() -> None:
    attempts = [Attempt(text=text) for text in ("no idea", "Is it 12?", "He buys 30.", "42 apples", "12")]
    assert plain_vote(SUM, attempts) == 1
    assert plain_vote(SUM, attempts[:1]) == 0


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


ARMS = ("small", "large")
CUT = FEATURES.index("unfinished")


def replies(n: int = 600) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs [n, 2, I] and grades [n, 2]: `small` is wrong where cut, `large` right about apples alone."""
    rng = np.random.default_rng(0)
    cut, apples = rng.random(n) < 0.5, rng.random(n) < 0.5
    columns = np.zeros((n, len(FEATURES)))
    columns[:, CUT] = cut
    inputs = gain_inputs(columns, ["Which apple?" if one else "Which pear?" for one in apples])
    return np.stack([inputs, inputs], axis=1), np.stack([~cut, apples], axis=1).astype(float)


def test_gain_is_of_the_other_arm_and_not_of_a_doubtful_reply() -> None:
    inputs, right = replies()
    model = GainModel.fit(ARMS, inputs, right, np.arange(len(right)) % 5)
    gains = model.gains("small", inputs[:, 0])
    assert not gains[:, 0].any()
    lead = right[:, 1] - right[:, 0]
    assert gains[lead > 0, 1].min() > 0.2 > 0.1 > np.abs(gains[lead == 0, 1]).max()  # drawn to the mean, which is 0
    assert gains[lead < 0, 1].max() < -0.2
    assert np.corrcoef(model.out_of_fold[:, 0, 1], lead)[0, 1] > 0.9
    turned = model.ordered(ARMS[::-1]).gains("small", inputs[:, 0])
    assert np.array_equal(turned, gains[:, ::-1])
    stored = GainModel.from_arrays(model.to_arrays(), ARMS)
    assert np.array_equal(stored.gains("large", inputs[:, 1]), model.gains("large", inputs[:, 1]))
    for arms in (("small",), ("small", "large", "other")):
        with pytest.raises(CheckpointError, match="gains"):
            GainModel.from_arrays(model.to_arrays(), arms)


def test_cascades_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "gsm8k_models"
    folder.mkdir()
    rows = [
        {
            "question": f"How many are {at} and {at}?",
            "gold": str(2 * at),
            "part": "test" if at % 2 else "train",
            "right": {"llama3_8b": at % 4 < 2, "gemma2_9b": True},
            "answers": {"llama3_8b": f"The answer is {2 * at + (at % 4 > 1)}", "gemma2_9b": f"{2 * at}"},
        }
        for at in range(80)
    ]
    (folder / "logs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "prompts.json").write_text("{}")
    pair = "Llama-3-8B > Gemma-2-9B"
    for flags in (["--train-only"], ["--refits", "2", "--json", str(tmp_path / "found.json")]):
        assert cascades.main([str(tmp_path), "--pairs", pair, *flags]) == 0
        assert f"| {pair} | 50.0 | 100.0 | gain |" in capsys.readouterr().out
    assert json.loads((tmp_path / "found.json").read_text())[pair]["n"] == 40
