"""The parts of a reward, registered by name for `--reward`.

A part returns a score in [0, 1] for the evidence. One that asks a model is a generator function: it yields
ChatRequests, is sent their Completions, and returns the score. A call that fails for good invalidates the step.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from query_mutator.data import pynames
from query_mutator.registry import Registry
from query_mutator.rewards.verdicts import is_not_sure, is_refusal
from query_mutator.types import ChatRequest, Completion, Question

Vector = NDArray[np.float32]  # [D], unit length


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What a part may use: the question with its gold, the rewrite, the answer, and their embeddings [D]."""

    question: Question
    rewrite: str
    answer: str
    question_vector: Vector
    rewrite_vector: Vector
    answer_vector: Vector
    reference_vector: Vector | None = None


#: Yields requests for a model, is sent their completions (none failed), returns the score.
Scoring = Generator[ChatRequest, Completion, float]
Part = Callable[[Evidence], float | Scoring]
PARTS: Registry[Part] = Registry("reward part", group="query_mutator.rewards")


def cosine(one: Vector, two: Vector) -> float:
    """Return the cosine of two unit vectors."""
    return float(np.dot(one, two))


@PARTS.register("right")
def right(evidence: Evidence) -> float:
    """Return 1 when the first qualified name in the answer is an accepted object, or it contains an accepted text."""
    accept = evidence.question.accept
    if not accept or is_refusal(evidence.answer):
        return 0.0
    if callable(pynames.resolve(accept[0])):
        named = pynames.first_name(evidence.answer)
        return float(named is not None and any(pynames.same_object(named, name) for name in accept))
    said = f" {_plain(evidence.answer)} "
    return float(any(f" {_plain(text)} " in said for text in accept))


@PARTS.register("similarity")
def similarity(evidence: Evidence) -> float:
    """Return the cosine of answer and reference, 0 for refusals and without a reference."""
    if evidence.reference_vector is None or is_refusal(evidence.answer):
        return 0.0
    return max(0.0, cosine(evidence.answer_vector, evidence.reference_vector))


@PARTS.register("meaning")
def meaning(evidence: Evidence) -> float:
    """Return the cosine of the rewrite and the original question, whose meaning must stay the same."""
    return max(0.0, cosine(evidence.question_vector, evidence.rewrite_vector))


@PARTS.register("answered")
def answered(evidence: Evidence) -> float:
    """Return 1 for an answer, 0.5 for "I'm not sure", 0 for a refusal."""
    if is_refusal(evidence.answer):
        return 0.0
    return 0.5 if is_not_sure(evidence.answer) else 1.0


@PARTS.register("keyword")
def keyword(evidence: Evidence) -> float:
    """Return the share of the reference's words of four letters or more that the answer contains."""
    words = {word for word in _plain(evidence.question.reference or "").split() if len(word) > 3}
    if not words or is_refusal(evidence.answer):
        return 0.0
    return len(words & set(_plain(evidence.answer).split())) / len(words)


def _plain(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.lower()))
