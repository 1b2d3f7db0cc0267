"""Periodic evaluation during training, on validation questions: a fold of the training questions, not learned from."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from ppo.frozen import InferencePolicy
from query_mutator.env.task import Task
from query_mutator.evaluation.heldout import fixed_sample
from query_mutator.evaluation.methods import Evaluator, Found, Job, MakePlayer, always, by_policy
from query_mutator.evaluation.outcomes import Outcome, check_failures, failure_kinds, mean, scored
from query_mutator.learners.direct import PRICES
from query_mutator.types import SUBMIT, Question

NUM_QUESTIONS = 300  # at most, on which calls are counted: of two hundred the mean is known to a tenth of a call
NUM_PRICES = (20, 10)  # over all prices, then between the two next to the budget


class PeriodicEval:
    """Evaluates the policy on a fixed sample of validation questions during training."""

    def __init__(self, evaluator: Evaluator, task: Task) -> None:
        self._evaluator = evaluator
        self._task = task
        submit = task.actions.index(SUBMIT)
        self._identity = mean(self._outcomes(always([submit]), name="validation, identity"), "success")

    def __call__(self, policy: InferencePolicy) -> dict[str, float]:
        """Return the greedy policy's figures on the scored questions of the sample under their metric keys.

        TooManyFailuresError when too many are unscored.
        """
        outcomes = self._outcomes(by_policy(policy), name="validation")
        return {
            "validation/success": mean(outcomes, "success"),
            "validation/score": mean(outcomes, "score"),
            "validation/refusals": mean(outcomes, "refused"),
            "validation/calls_per_question": mean(outcomes, "calls"),
            "validation/identity_success": self._identity,
            "validation/questions": len(outcomes),
            "validation/unscored": len(outcomes) - len(scored(outcomes)),
        }

    def _outcomes(self, make: MakePlayer, *, name: str) -> list[Outcome]:
        outcomes = self._evaluator.run(self._task, make, name=name)
        limit = self._evaluator.max_failure_rate
        check_failures(failure_kinds(outcomes), len(outcomes), max_failure_rate=limit)
        return outcomes


def make_periodic_eval(
    evaluator: Evaluator, task: Task, questions: Sequence[Question], *, size: int
) -> PeriodicEval | None:
    """Return the evaluation on `size` of the validation questions, None when there are none."""
    return PeriodicEval(evaluator, task.on(fixed_sample(questions, size))) if questions else None


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
