"""The comparison with the baselines on held-out questions: with `data.split`, the only code that reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from query_mutator.data import guard_questions
from query_mutator.encoder import CachedEncoder, Encoder, embed_documents
from query_mutator.env.task import Task
from query_mutator.evaluation.methods import Chooser, Evaluator, FloatArray, MakeChooser, evaluate
from query_mutator.training.learner import InferencePolicy
from query_mutator.training.system import System
from query_mutator.types import Question


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
