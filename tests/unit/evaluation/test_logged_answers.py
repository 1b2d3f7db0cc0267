"""Grades of logged replies: label, gold by the reward's parts, a judge's preference; and what is left out."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from query_mutator.data.logs import LoggedReply
from query_mutator.data.split import Split
from query_mutator.errors import DatasetError
from query_mutator.evaluation import logged_answers
from query_mutator.evaluation.logged_answers import GradedLog, grade_log
from query_mutator.rewards import WeightedReward
from query_mutator.types import NUMERIC, UNSAFE, Question


def reply(question: str = "What?", text: str = "Paris.", **more: object) -> LoggedReply:
    fields: dict[str, object] = {"where": "log.jsonl:1", "question": question, "form": "as_is", "reply": text, **more}
    return LoggedReply(**fields)  # type: ignore[arg-type]


def graded(
    *replies: LoggedReply, reward: str = "right", split: Split | None = None, forms: Sequence[str] = ()
) -> GradedLog:
    return grade_log(replies, reward=WeightedReward.parse(reward), split=split, forms=forms)


def test_a_label_counts_more_than_gold_and_gold_is_compared_as_for_questions() -> None:
    log = graded(
        reply(label=False, gold=("Paris",)),
        reply(gold=("paris",)),
        reply(text="12 apples, 5 of them red", gold=("12",)),
        reply(text="12 apples, 5 of them red", gold=("12",), tags=(NUMERIC,)),
        reply(text="Steps: Paris is large.\nAnswer: Rome", form="steps", gold=("Paris",)),
        reply(text="Steps: Paris is large.\nAnswer: Rome", form="unknown", gold=("Paris",)),
    )
    assert [answer.right for answer in log.answers] == [False, True, True, False, False, True]
    assert log.answers[4].attempt.text == "Rome"  # as the form reads it
    assert [answer.gold for answer in log.answers[:2]] == ["Paris", "paris"]
    assert log.graded_by == {"label": 1, "gold": 5}
    exact = graded(reply(gold=("paris",)), reply(text="It is Paris.", gold=("Paris",)), reward="exact")
    assert [answer.right for answer in exact.answers] == [True, False]


def test_a_reply_without_a_grade_is_an_error_but_in_traffic() -> None:
    with pytest.raises(DatasetError, match=r"log\.jsonl:1: neither `gold` nor `label`; give accepted answers"):
        graded(reply())
    log = graded(reply(is_traffic=True), reply(is_traffic=True, is_preferred=True), reply(is_traffic=True, label=True))
    assert log.left_out == {"without a label, gold or a judge's choice": 1}
    assert log.graded_by == {"the judge's preference": 1, "label": 1}
    assert "1 graded by the judge's preference" in log.in_words()
    assert "left out: 1 without a label" in log.in_words()


def test_questions_of_a_dataset_have_its_gold_and_held_out_ones_are_left_out() -> None:
    known = Question(id="1", text="Which city?", accept=("Paris",), about="cities")
    held_out = Question(id="2", text="Which river?", accept=("Seine",), about="rivers")
    split = Split(train=(known,), test=(held_out,))
    log = graded(
        reply("which  CITY?"),
        reply("Which city?", gold=("Rome",)),
        reply("Which river?", label=True),
        reply("And its source?", label=True, target="rivers"),
        reply("And its end?", gold=("Seine",), target="rivers"),
        split=split,
    )
    assert [(answer.right, answer.target) for answer in log.answers] == [(True, "cities"), (False, "cities")]
    assert log.left_out == {"about held-out questions of --dataset": 3}


def test_what_else_is_left_out_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logged_answers, "MOST_ASKED_AGAIN", 2)
    monkeypatch.setattr(logged_answers, "MOST_REPLIES", 3)
    again = [reply(label=True)] * 3
    log = graded(
        *again, reply(label=True, form="other"), reply(label=True, tags=(UNSAFE,)), reply("B", label=True),
        reply("C", label=True), forms=("as_is",),
    )  # fmt: skip
    assert log.left_out == {
        "of a question that was asked again and again": 1, "in other prompts than --forms": 1, "marked unsafe": 1,
        "after the first 3": 1,
    }  # fmt: skip
    assert (log.questions, dict(log.forms)) == (2, {"as_is": 3})


def test_a_part_that_cannot_grade_is_one_line_and_so_are_too_many_prompts() -> None:
    with pytest.raises(DatasetError, match=r"log\.jsonl:1: question .* has no tag"):
        graded(reply(gold=("Paris",)), reward="committed")
    with pytest.raises(DatasetError, match="more than 200 prompts; give each prompt one name"):
        graded(*(reply(label=True, form=f"prompt {number}") for number in range(201)))
