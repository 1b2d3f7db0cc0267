"""What a log teaches, and how its replies are graded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from query_mutator.confidence import Attempt, LoggedAnswer
from query_mutator.data import Split
from query_mutator.data.readers import LoggedReply
from query_mutator.errors import UsageError
from query_mutator.learners import Plan
from query_mutator.plan import table
from query_mutator.plan.arms import choose_from_log
from query_mutator.plan.choose import Fitted, PlanChoice, PlanPoint
from query_mutator.plan.table import GradedLog, grade_log
from query_mutator.rewards import WeightedReward
from query_mutator.types import UNSAFE, Question
from tests.unit.confidence.arithmetic_world import PROMPTS, graded_sums


def learned(answers: list[LoggedAnswer], *, budget: float | None = 2, price: float = 0.0) -> PlanChoice:
    return choose_from_log(answers, budget=budget, price=price)


def several(found: PlanChoice) -> list[PlanPoint]:
    return [point for point in found.points if point.fitted]


def rates(found: PlanChoice) -> dict[str, float]:
    return {point.plan.steps[0]: point.success for point in found.points if not point.fitted}


@pytest.fixture(scope="module")
def sums() -> list[LoggedAnswer]:
    return graded_sums(200, prompts=3)


@pytest.fixture(scope="module")
def of_sums(sums: list[LoggedAnswer]) -> PlanChoice:
    return learned(sums)


def fitted(found: PlanChoice, budget: float) -> Fitted:
    point = found.front[budget]
    assert point.fitted is not None
    return point.fitted


def test_submissions_by_p_right_are_right_more_often_than_votes_of_as_many(of_sums: PlanChoice) -> None:
    found = of_sums
    row = fitted(found, 2)
    assert row.lead > 0.1
    assert row.lead_ci[0] > 0
    assert 1.4 < fitted(found, 1.5).calls < 1.6
    assert fitted(found, 1.5).vote == fitted(found, 1.5).single  # a plain vote of two is the first answer
    assert sorted(found.order) == sorted(PROMPTS)
    assert found.chosen.plan.answer == "learned"
    assert found.chosen.calls <= 2
    assert found.bar.questions == found.chosen.questions == 200
    assert "Use the plan" in found.verdict


def test_chance_is_not_taken_for_a_better_plan() -> None:
    rng = np.random.default_rng(0)
    answers = [
        LoggedAnswer(question=f"What about {at}?", attempt=Attempt(text="Yes.", form=form), right=rng.random() < 0.5)
        for at in range(200)
        for form in PROMPTS
    ]
    found = learned(answers, budget=None, price=0.005)
    assert not found.chosen.plan.asks_early
    assert found.verdict.endswith("; P(right) orders right and wrong answers no better than chance.")
    assert (several(found), sorted(rates(found))) == ([], sorted(PROMPTS))
    assert found.confidence is not None
    assert abs(found.confidence.report.auroc - 0.5) < 0.1


def test_a_plan_whose_calls_cost_more_than_they_bring_is_not_chosen(sums: list[LoggedAnswer]) -> None:
    found = learned(sums, budget=None, price=0.9)
    assert not found.chosen.plan.asks_early
    assert found.verdict.endswith("; no plan of several prompts pays for its calls.")


def test_the_rows_of_a_log_may_come_in_any_order(sums: list[LoggedAnswer], of_sums: PlanChoice) -> None:
    one, other = of_sums, learned(sorted(sums, key=lambda answer: (answer.attempt.form, answer.attempt.text)))
    for budget in (1.5, 2, 3):
        before, after = fitted(one, budget), fitted(other, budget)
        assert (before.vote, before.single) == pytest.approx((after.vote, after.single), abs=0.03)
        assert before.success == pytest.approx(after.success, abs=0.05)


def test_a_question_that_was_asked_again_is_another_question_for_a_plan(sums: list[LoggedAnswer]) -> None:
    found = learned([*sums, *sums[:90]])
    assert found.bar.questions == 230


def test_prompts_of_other_questions_are_compared_by_rate_alone(sums: list[LoggedAnswer]) -> None:
    apart = [row for at, row in enumerate(sums) if PROMPTS.index(row.attempt.form) == at // 3 % 3]
    found = learned(apart)
    assert several(found) == []
    best = max(rates(found), key=lambda name: rates(found)[name])
    assert found.order == (best,)
    assert found.chosen.plan == Plan(steps=(best,))
    assert "of 67 logged answers right; too few questions were asked in two prompts" in found.verdict


def test_no_prompt_of_few_questions_is_recommended(sums: list[LoggedAnswer]) -> None:
    """A log of many questions, each in a prompt of its own few, has none that rates can be compared by."""
    apart = [replace(row, attempt=replace(row.attempt, form=f"p{at // 21}")) for at, row in enumerate(sums[::3])]
    with pytest.raises(UsageError, match="200 graded answers to 21 questions in one prompt"):
        learned(apart)
    again = [row for row in sums[::3][:40] for _ in range(8)]  # asked again and again
    with pytest.raises(UsageError, match="320 graded answers to 40 questions in one prompt are too few"):
        learned(again)
    rare = [replace(row, attempt=replace(row.attempt, form="rare"), right=True) for row in sums[:60:3]]
    assert set(rates(learned([*sums[::3], *rare]))) == {PROMPTS[0]}


@pytest.mark.parametrize("budget", [1.0, 1.0051, 1.006, 1.01, 3.0])
def test_a_budget_of_hardly_more_than_one_call_is_no_error(budget: float, sums: list[LoggedAnswer]) -> None:
    found = learned(sums, budget=budget)
    assert found.chosen.calls <= budget
    assert all(point.fitted for point in found.points if point.plan.asks_early)


def test_several_replies_in_one_prompt_are_answers_to_one_question(sums: list[LoggedAnswer]) -> None:
    once = [row for row in sums if row.attempt.form == PROMPTS[0]]
    (one,), (four,) = (learned(rows).points for rows in (once, once * 4))
    assert (one.questions, four.questions) == (200, 800)
    assert four.success_ci == pytest.approx(one.success_ci, abs=0.02)


def test_a_prompt_with_missing_answers_may_be_the_best(sums: list[LoggedAnswer]) -> None:
    rng = np.random.default_rng(0)
    texts = [row for row in sums if row.attempt.form == PROMPTS[0]]
    answers = [
        replace(row, attempt=replace(row.attempt, form=f"p{at}"), right=row.right or (at == 5 and rng.random() < 0.5))
        for row in texts
        for at in range(6)
        if rng.random() < (0.6 if at == 5 else 0.7)
    ]
    found = learned(answers)
    assert found.order[0] == max(rates(found), key=lambda name: rates(found)[name]) == "p5"
    assert len(rates(found)) > 1


ALONE = PlanPoint(plan=Plan(steps=("a",)), success=0.55, success_ci=(0.4, 0.7), score=0.55, calls=1.0, questions=90)
SEVERAL = Plan(steps=("a", "ask", "b"), answer="learned")
FITTED = Fitted(calls=2, success=0.51, vote=0.5, single=0.5, lead=0.0, lead_ci=(0.0, 0.0))


def test_a_plan_counts_at_most_what_rules_of_other_folds_bring() -> None:
    several = replace(ALONE, plan=SEVERAL, success=0.6, score=0.6, fitted=replace(FITTED, success=0.5))
    for budget in (None, 2.0):
        assert PlanChoice(points=[several, ALONE], bar=ALONE, price=0.0, budget=budget).saved == ALONE
        assert PlanChoice(points=[replace(several, fitted=None), ALONE], bar=ALONE, price=0.0).points[0].success == 0.6


@pytest.mark.parametrize(("searched", "is_learned"), [(0.5, True), (0.52, False)])
@pytest.mark.parametrize("budget", [None, 2.0])
def test_a_searched_plan_counts_what_plans_chosen_on_other_folds_bring(
    budget: float | None, searched: float, is_learned: bool
) -> None:
    learned = replace(ALONE, plan=SEVERAL, success=0.53, score=0.53, fitted=FITTED)
    found = PlanChoice(points=[ALONE, learned], bar=ALONE, price=0.0, budget=budget, calls=9, searched=(searched, 0.1))
    assert found.chosen == (learned if is_learned else ALONE)
    assert replace(found, calls=0).chosen == ALONE  # of a log, whose prompts were not searched


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
        reply(text="12 or 5 apples", gold=("12",)),
        reply(text="Steps: Paris is large.\nAnswer: Rome", form="steps", gold=("Paris",)),
        reply(text="Steps: Paris is large.\nAnswer: Rome", form="unknown", gold=("Paris",)),
    )
    assert [answer.right for answer in log.answers] == [False, True, True, False, False, False]
    assert log.answers[4].attempt.text == "Rome"  # as the form reads it
    assert [answer.gold for answer in log.answers[:2]] == ["Paris", "paris"]
    assert log.graded_by == {"label": 1, "gold": 5}


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


def test_held_out_questions_are_known_by_their_words() -> None:
    held_out = Question(id="2", text="Which river is 5 - 3 miles long?", accept=("Seine",))
    log = graded(
        reply("which river is 5 - 3 miles long", label=True),
        reply('"Which river" is 5 - 3 miles long ?', label=True),
        reply("And its source?", label=True, target="seine"),
        reply("Which river is 5 + 3 miles long?", label=True),
        split=Split(train=(), test=(held_out,)),
    )
    assert [answer.question for answer in log.answers] == ["Which river is 5 + 3 miles long?"]


def test_answers_to_a_question_have_one_target_and_so_one_fold() -> None:
    log = graded(
        reply("A?", label=True, target="one"),
        reply("a", label=True, target="two"),
        reply("B", label=True, target="two"),
        reply("B", label=True),
        reply("C", label=True),
    )
    assert [answer.target for answer in log.answers] == ["one", "one", "one", "one", "C"]


def test_what_else_is_left_out_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "MOST_ASKED_AGAIN", 2)
    again = [reply(label=True)] * 3
    log = graded(
        *again, reply(label=True, form="other"), reply(label=True, tags=(UNSAFE,)), reply("B", label=True),
        forms=("as_is",),
    )  # fmt: skip
    assert log.left_out == {
        "of a question that was asked again and again": 1, "in other prompts than --forms": 1, "marked unsafe": 1,
    }  # fmt: skip
    assert log.in_words().startswith("3 answers to 2 questions in 1 prompt; 3 graded by label; left out: 1 ")
    assert dict(log.forms) == {"as_is": 3}
