"""Questions with answers that forms show to the target: a frozen bank, and the nearest ones of each question.

B questions of the bank, Q questions, D dimensions of an embedding
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from query_mutator.data.split import target_key
from query_mutator.encoder import Encoder
from query_mutator.forms import Example
from query_mutator.types import FloatArray, Question

__all__ = ["NUM_EXAMPLES", "Bank", "bank_of", "can_be_shown"]

NUM_EXAMPLES = 4
ROWS_AT_ONCE = 2000  # of questions next to all others, which bounds the memory
_MAX_CHARS = 400  # of an example: longer ones crowd out the question


@dataclass(frozen=True, slots=True)
class Bank:
    """Questions with an accepted answer [B], and their embeddings [B, D]."""

    questions: tuple[Question, ...]
    vectors: FloatArray

    def nearest(self, questions: Sequence[Question], vectors: FloatArray) -> tuple[tuple[Example, ...], ...]:
        """Return for each question [Q] with its embedding [Q, D] the nearest others, the nearest last.

        A question about the same target is none of them, nor is one of the same text.
        """
        if not self.questions:
            return ((),) * len(questions)
        targets, found = [target_key(question) for question in self.questions], list[tuple[Example, ...]]()
        for start in range(0, len(questions), ROWS_AT_ONCE):
            some = slice(start, start + ROWS_AT_ONCE)
            order = np.argsort(-(vectors[some] @ self.vectors.T), axis=1, kind="stable")
            found += [
                self._examples(question, targets, row.tolist())
                for question, row in zip(questions[some], order, strict=True)
            ]
        return tuple(found)

    def _examples(self, question: Question, targets: Sequence[str], order: Sequence[int]) -> tuple[Example, ...]:
        target = target_key(question)
        others = (
            self.questions[place]
            for place in order
            if targets[place] != target and self.questions[place].text != question.text
        )
        chosen = [other for other, _ in zip(others, range(NUM_EXAMPLES), strict=False)]
        return tuple(Example(other.text, other.accept[0]) for other in reversed(chosen))


def can_be_shown(question: Question) -> bool:
    """Return whether a question has an accepted answer and is short enough to be an example."""
    return bool(question.accept) and len(question.text + question.accept[0]) <= _MAX_CHARS


def bank_of(questions: Sequence[Question], encoder: Encoder) -> Bank:
    """Return the bank of those questions that can be shown."""
    shown = tuple(filter(can_be_shown, questions))
    return Bank(shown, encoder.encode([question.text for question in shown]))
