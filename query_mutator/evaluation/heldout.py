"""Held-out questions: the periodic evaluation during training, and the comparison with the baselines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from query_mutator.data import guard_questions
from query_mutator.encoder import CachedEncoder, Encoder, embed_documents
from query_mutator.env.task import SUBMIT, Task
from query_mutator.evaluation.methods import Chooser, Evaluator, FloatArray, MakeChooser, Outcome, always, evaluate
from query_mutator.training.learner import InferencePolicy
from query_mutator.training.system import System
from query_mutator.types import Question

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
        self._identity = _mean(evaluator.run(task, always([submit]), name="held-out, identity"), "success")

    def __call__(self, policy: InferencePolicy) -> dict[str, float]:
        """Return the greedy policy's figures on the sample under their metric keys."""
        outcomes = self._evaluator.run(self._task, greedy(policy), name="held-out")
        return {
            "eval/success": _mean(outcomes, "success"),
            "eval/score": _mean(outcomes, "score"),
            "eval/refusals": _mean(outcomes, "refused"),
            "eval/calls_per_question": _mean(outcomes, "calls"),
            "eval/identity_success": self._identity,
        }


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
    """Return the report on held-out `questions` as plain JSON types: every method, who answered, from what."""
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


def _mean(outcomes: Sequence[Outcome], name: str) -> float:
    return float(np.mean([getattr(outcome, name) for outcome in outcomes]))
