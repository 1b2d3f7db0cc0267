"""A split that never moves: it hashes what a question is about, so no target is in two parts.

test          38 % of the targets, read by evaluation commands and at the end of a run only
train         the others, in five folds
validation    one fold of them, left out of training: curves and every choice between settings use it
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from query_mutator.settings import ValidationFold
from query_mutator.types import Question

TEST_PERCENT = 38
FOLDS = 5
_CLOSED = {"yes", "no", "true", "false"}  # answers that many questions have
_LETTER = re.compile(r"\(?[A-Za-z][).]?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """The questions to learn from, those to choose by, and the held-out ones."""

    train: tuple[Question, ...]
    test: tuple[Question, ...] = ()
    validation: tuple[Question, ...] = ()
    guard: tuple[Question, ...] = ()  # that should be refused: asked for the guard metric, never learned from
    source: Mapping[str, Any] = field(default_factory=dict)  # what was downloaded, with digests

    @property
    def sha256(self) -> str:
        """Return the digest of all questions with their gold, whatever their order and the file they are from."""
        rows = sorted(
            (q.id, q.text, list(q.accept), q.reference or "", [*q.tags, *filter(None, [q.about])], *map(str, q.context))
            for q in self.train + self.test + self.validation
        )
        found = hashlib.sha256()
        for row in rows:
            found.update(json.dumps(row).encode())
        return found.hexdigest()


def target_key(question: Question) -> str:
    """Return what the question is about: where it does not say, its first accepted name, else its own text.

    A question that is answered by yes or no, or by the letter of a choice, is about itself.
    """
    name = question.accept[0] if question.accept else question.text
    return question.about or (question.text if name.casefold() in _CLOSED or _LETTER.fullmatch(name) else name)


def in_test(question: Question) -> bool:
    """Return whether a question is held out: sha256 of its target modulo 100, so adding rows moves no other row."""
    return int(_digest(question)[:8], 16) % 100 >= 100 - TEST_PERCENT


def fold_of(question: Question) -> int:
    """Return the fold of a training question, 0 to 4, by other digits of the same hash than `in_test` reads."""
    return int(_digest(question)[8:16], 16) % FOLDS


def split_questions(questions: Iterable[Question], fold: ValidationFold = "none") -> Split:
    """Return the hash-stable split, with one fold of the training questions as validation; order is kept."""
    parts: dict[str, list[Question]] = {"train": [], "test": [], "validation": []}
    for question in questions:
        part = "test" if in_test(question) else "validation" if fold_of(question) == fold else "train"
        parts[part].append(question)
    return Split(train=tuple(parts["train"]), test=tuple(parts["test"]), validation=tuple(parts["validation"]))


def _digest(question: Question) -> str:
    return hashlib.sha256(target_key(question).encode()).hexdigest()
