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

__all__ = ["price_for_budget"]

NUM_PRICES = 20


def price_for_budget(evaluator: Evaluator, task: Task, policy: InferencePolicy, budget: float) -> tuple[float, float]:
    """Return the lowest price with at most so many mean calls on the questions of a task, and those calls.

    The highest price where no price has so few, as with a learner that saw one price.
    """
    prices = [float(f"{price:.2g}") for price in np.geomspace(*PRICES, NUM_PRICES)]
    jobs = {
        price: Job(name=f"{price:g}", task=task.with_rules(call_price=(price,)), make=by_policy(policy))
        for price in prices
    }
    found = Found()
    evaluator.run_all(list(jobs.values()), found, title="price of a call")
    calls = {price: _mean_calls(found[job.name].values()) for price, job in jobs.items()}
    price = next((price for price in prices if calls[price] <= budget), prices[-1])
    return price, calls[price]


def _mean_calls(outcomes: Iterable[Outcome]) -> float:
    calls = [outcome.calls for outcome in outcomes if outcome.error is None]
    return sum(calls) / len(calls) if calls else math.inf
