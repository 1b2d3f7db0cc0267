"""The price of a call at which a policy makes as many calls as a budget allows."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from query_mutator.env.task import Task
from query_mutator.evaluation.methods import Evaluator, Found, Job, by_policy
from query_mutator.evaluation.outcomes import Outcome
from query_mutator.learners.direct import PRICES
from query_mutator.learners.learner import InferencePolicy

__all__ = ["NUM_QUESTIONS", "price_for_budget"]

NUM_QUESTIONS = 300  # at most, on which calls are counted: of two hundred the mean is known to a tenth of a call
NUM_PRICES = (20, 10)  # over all prices, then between the two next to the budget


def price_for_budget(evaluator: Evaluator, task: Task, policy: InferencePolicy, budget: float) -> tuple[float, float]:
    """Return the lowest price with at most so many mean calls on the questions of a task, and those calls.

    The highest price where no price has so few, as with a learner that saw one price.
    """
    found, calls, ends = Found(), dict[float, float](), PRICES
    for count in NUM_PRICES:
        prices = [float(f"{price:.3g}") for price in np.geomspace(*ends, count)]
        jobs = {
            price: Job(name=f"{price:g}", task=task.with_rules(call_price=(price,)), make=by_policy(policy))
            for price in prices
            if price not in calls
        }
        evaluator.run_all(list(jobs.values()), found, title="price of a call")
        calls |= {price: _mean_calls(found[job.name].values()) for price, job in jobs.items()}
        at = next((at for at, price in enumerate(prices) if calls[price] <= budget), None)
        if not at:  # all prices are low enough, or none is
            break
        ends = (prices[at - 1], prices[at])
    price = prices[-1 if at is None else at]
    return price, calls[price]


def _mean_calls(outcomes: Iterable[Outcome]) -> float:
    calls = [outcome.calls for outcome in outcomes if outcome.error is None]
    return sum(calls) / len(calls) if calls else math.inf
