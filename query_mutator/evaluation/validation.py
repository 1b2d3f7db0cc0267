"""Periodic evaluation during training, on validation questions: a fold of the training questions, not learned from."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from ppo.frozen import InferencePolicy
from query_mutator.env.task import Task
from query_mutator.evaluation.heldout import fixed_sample
from query_mutator.evaluation.methods import Evaluator, Found, Job, MakePlayer, SharedCalls, always, by_policy
from query_mutator.evaluation.outcomes import Outcome, failure_kinds, mean, scored
from query_mutator.learners.direct import PRICES
from query_mutator.session.play import check_failures
from query_mutator.types import SUBMIT, Question

NUM_QUESTIONS = 300  # at most, on which calls are counted: of two hundred the mean is known to a tenth of a call
NUM_PRICES = 65  # 7.5 % apart
FEW_PRICES = 8  # every eighth price is tried before those between two of them


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
    """Return a price with at most so many mean calls on the questions of a task, and those calls.

    The lowest such price of a few, then of those between it and the next lower one. Prices that are tried together
    share their calls and are waited for once. Where no price makes so few calls, as with a learner that saw a single
    price, it is the highest.
    """
    prices = [float(f"{price:.3g}") for price in np.geomspace(*PRICES, NUM_PRICES)]
    found, shared = Found(), SharedCalls()

    def lowest_of(places: range) -> int | None:
        jobs = [
            Job(name=f"{prices[place]:g}", task=task.with_rules(call_price=(prices[place],)), make=by_policy(policy))
            for place in places
        ]
        evaluator.run_all(jobs, found, title="price of a call", shared=shared)
        return next((place for place in places if calls_at(place) <= budget), None)

    def calls_at(place: int) -> float:
        return _mean_calls(found[f"{prices[place]:g}"].values())

    place, step = lowest_of(range(0, NUM_PRICES, NUM_PRICES - 1)), NUM_PRICES - 1
    while place and step > 1:
        step //= FEW_PRICES
        between = lowest_of(range(place - step * (FEW_PRICES - 1), place, step))
        place = place if between is None else between
    place = NUM_PRICES - 1 if place is None else place
    return prices[place], calls_at(place)


def _mean_calls(outcomes: Iterable[Outcome]) -> float:
    calls = [outcome.calls for outcome in outcomes if outcome.error is None]
    return sum(calls) / len(calls) if calls else math.inf
