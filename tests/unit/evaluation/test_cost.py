"""The price within a budget, what an evaluation costs and what it shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from numpy.typing import NDArray

from query_mutator import forms
from query_mutator.env.episode import PRICE_SCALE
from query_mutator.env.task import Task
from query_mutator.errors import UsageError
from query_mutator.evaluation.comparison import Evaluator
from query_mutator.evaluation.heldout import EvaluationCost, power_in_words, price_for_budget
from query_mutator.learners.direct import PRICES
from query_mutator.llm.client import Client, RetryPolicy
from query_mutator.types import FloatArray, Question

MAX_ASKS = 4
UPPER = {3: 0.01, 2: 0.06}  # the price from which so many asks are too dear
WHOLE = EvaluationCost(
    num_test=300,
    num_guard=28,
    num_train=200,
    num_operators=14,
    num_asked=14,
    episode_calls=11,
    search_calls=3000,
)
QUESTIONS = [Question(id=str(n), text=f"{n}?", accept=("yes",), about=str(n // 2)) for n in range(400)]


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
    assert len(prices) <= 2 + 7 + 7
    lowest = 0.0 if calls == 3 else UPPER[calls + 1]
    expected = PRICES[1] if budget < 1 else next(one for one in prices if one >= lowest)
    assert price == pytest.approx(expected)
    if budget >= 1:
        assert price <= max(1.08 * lowest, PRICES[0])  # close to the lowest


def test_the_bound_is_that_of_every_method_ranking_and_search() -> None:
    per_question = 3 * 11 + 1 + 12  # policy, random and best of k, and the plan
    assert WHOLE.calls == (300 + 28) * per_question + 120 * (1 + 14 + 14) + 3000
    assert replace(WHOLE, num_asked=9).calls == WHOLE.calls - 120 * 5  # five of them are local


@pytest.mark.parametrize("max_calls", [600, 1000, 5000, 12_345, 20_000])
def test_the_largest_evaluation_that_fits_is_made(max_calls: int) -> None:
    found = WHOLE.within(max_calls)
    assert found.calls <= max_calls
    assert replace(found, num_test=found.num_test + 1).calls > max_calls


def test_a_verdict_gets_its_questions_before_training_questions_are_ranked() -> None:
    small = replace(WHOLE, num_test=27, num_guard=0, num_train=45, search_calls=0)
    assert small.within(replace(small, num_test=20, num_train=20).calls).num_test == 20


@pytest.mark.parametrize("max_calls", [300, 1500, 6000, 25_000])
def test_a_plan_search_keeps_a_third_of_the_calls_or_all_that_it_asked_for(max_calls: int) -> None:
    assert WHOLE.within(max_calls).search_calls == min(3000, max_calls // 3)
    dear = replace(WHOLE, search_calls=50_000)
    others = WHOLE.calls - WHOLE.search_calls
    assert dear.within(others + 40_000).search_calls == 40_000
    assert dear.within(others + 40_000).num_test == WHOLE.num_test


def test_fewer_calls_than_one_question_takes_are_refused_with_the_number_that_does() -> None:
    assert WHOLE.within(None) == WHOLE.within(WHOLE.calls) == WHOLE
    with pytest.raises(UsageError, match="give at least 97"):
        WHOLE.within(10)


def test_what_questions_can_show_is_said() -> None:
    assert power_in_words(QUESTIONS).startswith(
        "400 held-out questions can show differences of 8.5 points or more (80 %"
    )
    for few in (QUESTIONS[:3], []):
        assert f"{len(few)} held-out questions are too few to show a difference (" in power_in_words(few)
