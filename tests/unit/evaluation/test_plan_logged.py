"""What a log of graded sums teaches: an order of prompts, when to stop, and figures that are out of fold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from numpy.typing import NDArray

from query_mutator import forms
from query_mutator.confidence import Attempt, LoggedAnswer
from query_mutator.confidence.stopping import StoppingRule
from query_mutator.env.observation import PRICE_SCALE
from query_mutator.env.task import Task
from query_mutator.errors import UsageError
from query_mutator.evaluation.methods import Evaluator
from query_mutator.evaluation.plan_learned import AnswerPaths
from query_mutator.evaluation.plan_logged import LoggedPlans, logged_plans
from query_mutator.evaluation.validation import price_for_budget
from query_mutator.learners.direct import PRICES
from query_mutator.learners.plan import Plan
from query_mutator.llm.client import Client
from query_mutator.llm.retry import RetryPolicy
from query_mutator.stats.paired import difference_interval
from query_mutator.types import FloatArray
from tests.unit.confidence.arithmetic_world import PROMPTS, graded_sums

MAX_ASKS = 4
UPPER = {3: 0.01, 2: 0.06}  # the price from which so many asks are too dear


def learned(answers: list[LoggedAnswer], *, budget: float | None = 2, price: float = 0.0) -> LoggedPlans:
    return logged_plans(answers, budget=budget, price=price, candidates=("linear",))


@pytest.fixture(scope="module")
def sums() -> list[LoggedAnswer]:
    return graded_sums(200, prompts=3)


def test_submissions_by_p_right_are_right_more_often_than_votes_of_as_many(sums: list[LoggedAnswer]) -> None:
    found = learned(sums)
    rows = {row.calls: row for row in found.by_calls}
    assert list(rows) == [1, 1.5, 2, 3]  # as far as there are prompts
    assert rows[1].learned == rows[1].vote == rows[1].single
    assert rows[2].lead > 0.1
    assert rows[2].lead_ci[0] > 0
    assert 1.4 < rows[1.5].learned_calls < 1.6
    assert sorted(found.order) == sorted(PROMPTS)
    assert found.chosen.plan.answer == "learned"
    assert found.chosen.calls <= 2
    assert found.questions == found.chosen.questions == 200
    assert "Use the plan" in found.verdict


def test_the_vote_has_as_many_calls_as_were_made() -> None:
    rows = {row.calls: row for row in learned(graded_sums(90, prompts=3, seed=1)).by_calls}
    more = rows[2].learned_calls - 2
    assert more > 0.05
    # A plain vote of two is the first answer.
    assert rows[2].vote == pytest.approx((1 - more) * rows[1].vote + more * rows[3].vote)
    assert rows[2].vote > rows[1].vote


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
    assert (found.by_calls, sorted(found.rates)) == ((), sorted(PROMPTS))
    assert abs(found.confidence.report.auroc - 0.5) < 0.1


def test_a_plan_whose_calls_cost_more_than_they_bring_is_not_chosen(sums: list[LoggedAnswer]) -> None:
    found = learned(sums, budget=None, price=0.9)
    assert not found.chosen.plan.asks_early
    assert found.verdict.endswith("; no plan of several prompts pays for its calls.")


def test_the_rows_of_a_log_may_come_in_any_order(sums: list[LoggedAnswer]) -> None:
    by_prompt = sorted(sums, key=lambda answer: (answer.attempt.form, answer.attempt.text))
    one, other = (learned(rows).by_calls for rows in (sums, by_prompt))
    for before, after in zip(one, other, strict=True):
        assert (before.vote, before.single) == pytest.approx((after.vote, after.single), abs=0.03)
        assert before.learned == pytest.approx(after.learned, abs=0.05)


def test_a_question_that_was_asked_again_is_another_question_for_a_plan(sums: list[LoggedAnswer]) -> None:
    found = learned([*sums, *sums[:90]])
    assert found.questions == 230


def test_prompts_of_other_questions_are_compared_by_rate_alone(sums: list[LoggedAnswer]) -> None:
    apart = [row for at, row in enumerate(sums) if PROMPTS.index(row.attempt.form) == at // 3 % 3]
    found = learned(apart)
    assert found.by_calls == ()
    best = max(found.rates, key=lambda name: found.rates[name])
    assert found.order == (best,)
    assert found.chosen.plan == Plan(steps=(best,))
    assert "of 67 logged answers right; too few questions were asked in two prompts" in found.verdict


def test_a_prompt_with_few_answers_is_not_compared(sums: list[LoggedAnswer]) -> None:
    rare = [replace(row, attempt=replace(row.attempt, form="rare")) for row in sums[:60:3]]
    found = learned([*sums, *rare])
    assert found.not_compared == {"rare": 20}
    assert "rare" not in found.rates


def test_too_few_answers_are_one_line(sums: list[LoggedAnswer]) -> None:
    with pytest.raises(
        UsageError, match="147 graded answers to 49 questions are too few to learn from; log answers to 50"
    ):
        learned(sums[:147])
    with pytest.raises(UsageError, match="150 right and 0 wrong answers are too few"):
        learned([replace(row, right=True) for row in sums[:150]])


@pytest.mark.parametrize("budget", [1.0, 1.0051, 1.006, 1.01, 3.0])
def test_a_budget_of_hardly_more_than_one_call_is_no_error(budget: float, sums: list[LoggedAnswer]) -> None:
    found = learned(sums, budget=budget)
    assert found.chosen.calls <= budget
    assert set(found.fitted) == {point.plan for point in found.points if point.plan.asks_early}


def test_intervals_resample_what_the_questions_are_about(sums: list[LoggedAnswer]) -> None:
    places = {text: at for at, text in enumerate(dict.fromkeys(row.question for row in sums))}
    for size in (1, 4):
        about = [replace(row, target=f"sum {places[row.question] // size}") for row in sums]
        row = learned(about).by_calls[0]  # of one call: no outcome differs
        assert row.lead_ci == difference_interval(np.zeros(200), [str(at // size) for at in range(200)])


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
    assert found.order[0] == max(found.rates, key=lambda name: found.rates[name]) == "p5"
    assert len(found.rates) > 1


def test_the_threshold_of_a_plan_is_rounded_down_so_that_it_asks_no_more_than_its_rule() -> None:
    p = [[0.56789, 0.9], [0.2, 0.9]]
    paths = AnswerPaths(order=("a", "b"), p=p, right=np.eye(2), scores=np.eye(2))
    point = paths.point(StoppingRule(threshold=0.56789, max_calls=2))
    assert point.plan.stop_fit == 0.5678
    assert (point.calls, point.success) == (1.5, 1.0)


def test_a_threshold_above_1_asks_all() -> None:
    paths = AnswerPaths(order=("a", "b"), p=[[1.0, 1.0]], right=np.eye(2)[:1], scores=np.eye(2)[:1])
    point = paths.point(StoppingRule(threshold=1.5, max_calls=2))
    assert (point.plan.stop_fit, point.calls, point.success) == (None, 2.0, 0.0)


@dataclass(frozen=True)
class Actions:
    actions: NDArray[np.int64]


class Thrifty:
    """Asks three times at a low price, twice at a medium one, else once."""

    def __init__(self, task: Task) -> None:
        self.task, self.prices = task, set[float]()

    def act(self, obs: FloatArray, rngs: Sequence[np.random.Generator], *, greedy: bool = False) -> Actions:
        put, names = self.task.observer.slices, self.task.actions
        prices = np.round(obs[:, put["price"].start] / PRICE_SCALE, 6).tolist()
        self.prices.update(prices)
        wanted = [next((asks for asks, upper in UPPER.items() if price < upper), 1) for price in prices]
        asked = np.rint(obs[:, put["asked"].stop - 1] * MAX_ASKS).astype(int).tolist()
        order = [*map(names.index, ("ask", "question_answer", "steps", "submit"))]
        return Actions(np.array([order[n] if n < most else order[-1] for n, most in zip(asked, wanted, strict=True)]))


@pytest.mark.parametrize(("budget", "calls"), [(5, 3), (3, 3), (2.9, 2), (2, 2), (1.5, 1), (0.5, 1)])
def test_the_price_is_the_lowest_that_the_budget_allows(
    budget: float, calls: int, tiny_task: Callable[..., Task], tiny_client: Client
) -> None:
    task = tiny_task(forms=forms.select("question_answer,steps"), ask="form", max_asks=MAX_ASKS, max_episode_steps=6)
    evaluator = Evaluator(
        client=tiny_client, batch_size=4, retry_policy=RetryPolicy(max_retries=0), max_failure_rate=1.0
    )
    policy = Thrifty(task)
    price, found = price_for_budget(evaluator, task, policy, budget)
    assert found == calls
    prices = sorted(policy.prices)
    assert prices[0] == pytest.approx(PRICES[0])
    assert len(prices) <= 10
    lowest = 0.0 if calls == 3 else UPPER[calls + 1]
    expected = PRICES[1] if budget < 1 else next(one for one in prices if one >= lowest)
    assert price == pytest.approx(expected)
    if budget >= 1:
        assert price <= max(1.03 * lowest, PRICES[0])  # close to the lowest
