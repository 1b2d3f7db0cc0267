"""Held-out questions: the periodic evaluation during training, and the comparison with the baselines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from query_mutator.data import guard_questions
from query_mutator.encoder import CachedEncoder, Encoder, embed_documents
from query_mutator.env.task import Task
from query_mutator.evaluation.methods import Chooser, Evaluator, FloatArray, MakeChooser, always, evaluate
from query_mutator.evaluation.outcomes import Outcome, check_failures, failure_kinds, mean, scored
from query_mutator.training.learner import InferencePolicy
from query_mutator.training.system import System
from query_mutator.types import SUBMIT, Question

SAMPLE_SEED = 0  # the same questions in every run, whatever its seed


def greedy(policy: InferencePolicy) -> MakeChooser:
    """Return choosers that take the policy's most probable action."""

    def choose(obs: FloatArray) -> int:
        return int(policy.act(obs[None], (), greedy=True).actions[0])

    def make(_: int) -> Chooser:
        return choose

    return make


def embed_questions(encoder: Encoder, questions: Sequence[Question]) -> None:
    """Put questions and references into the encoder's cache, from the cache folder if they were embedded before."""
    texts = sorted({text for question in questions for text in (question.text, question.reference) if text})
    if isinstance(encoder, CachedEncoder) and texts:
        encoder.put(texts, embed_documents(texts, encoder, what="embedding questions"))


def fixed_sample(questions: Sequence[Question], size: int) -> tuple[Question, ...]:
    """Return `size` of the questions, the same ones each time, in their order."""
    if len(questions) <= size:
        return tuple(questions)
    chosen = np.random.default_rng(SAMPLE_SEED).choice(len(questions), size, replace=False)
    return tuple(questions[index] for index in sorted(chosen))


class PeriodicEval:
    """Evaluates the policy on a fixed sample of held-out questions during training."""

    def __init__(self, evaluator: Evaluator, task: Task) -> None:
        self._evaluator = evaluator
        self._task = task
        submit = task.actions.index(SUBMIT)
        self._identity = mean(self._outcomes(always([submit]), name="held-out, identity"), "success")

    def __call__(self, policy: InferencePolicy) -> dict[str, float]:
        """Return the greedy policy's figures on the scored questions of the sample under their metric keys.

        TooManyFailuresError when too many are unscored.
        """
        outcomes = self._outcomes(greedy(policy), name="held-out")
        return {
            "eval/success": mean(outcomes, "success"),
            "eval/score": mean(outcomes, "score"),
            "eval/refusals": mean(outcomes, "refused"),
            "eval/calls_per_question": mean(outcomes, "calls"),
            "eval/identity_success": self._identity,
            "eval/questions": len(outcomes),
            "eval/unscored": len(outcomes) - len(scored(outcomes)),
        }

    def _outcomes(self, make: MakeChooser, *, name: str) -> list[Outcome]:
        outcomes = self._evaluator.run(self._task, make, name=name)
        limit = self._evaluator.max_failure_rate
        check_failures(failure_kinds(outcomes), len(outcomes), max_failure_rate=limit)
        return outcomes


def make_periodic_eval(
    evaluator: Evaluator, task: Task, questions: Sequence[Question], *, size: int
) -> PeriodicEval | None:
    """Return the evaluation on `size` of the held-out questions, None when there are none."""
    return PeriodicEval(evaluator, task.on(fixed_sample(questions, size))) if questions else None


def compare(
    evaluator: Evaluator,
    system: System,
    task: Task,
    questions: Sequence[Question],
    policy: InferencePolicy,
    *,
    seed: int,
    rewriter: str | None = None,
) -> dict[str, Any]:
    """Return the report on held-out `questions` as plain JSON types: every method, who answered, from what.

    It is a report even if no question could be scored; `check_report` raises for too many of those.
    """
    embed_questions(system.encoder, questions)
    report = evaluate(
        evaluator,
        train=task,
        test=task.on(questions),
        guard=guard_questions(),
        policy=greedy(policy),
        seed=seed,
        rewriter=rewriter,
    )
    return {
        "n": report.pop("n"),
        "target": system.target_model,
        "mutator": system.mutator_model,
        "embedded": system.embedded,
        "encoder": system.encoder.source,
        **report,
    }
