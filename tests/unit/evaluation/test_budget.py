"""The price of a call at which a policy makes as many calls as a budget allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from query_mutator import forms
from query_mutator.env.observation import PRICE_SCALE
from query_mutator.env.task import Task
from query_mutator.evaluation.methods import Evaluator
from query_mutator.evaluation.validation import price_for_budget
from query_mutator.learners.direct import PRICES
from query_mutator.llm.client import Client
from query_mutator.llm.retry import RetryPolicy
from query_mutator.types import FloatArray

MAX_ASKS = 4
UPPER = {3: 0.01, 2: 0.06}  # the price from which so many asks are too dear


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
