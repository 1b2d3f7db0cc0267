"""Periodic evaluation during training, on validation questions: a fold of the training questions, not learned from."""

from __future__ import annotations

from collections.abc import Sequence

from query_mutator.env.task import Task
from query_mutator.evaluation.heldout import fixed_sample
from query_mutator.evaluation.methods import Evaluator, MakePlayer, always, by_policy
from query_mutator.evaluation.outcomes import Outcome, check_failures, failure_kinds, mean, scored
from query_mutator.learners.learner import InferencePolicy
from query_mutator.types import SUBMIT, Question

__all__ = ["PeriodicEval", "make_periodic_eval"]


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
