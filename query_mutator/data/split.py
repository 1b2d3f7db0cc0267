"""A train/test split that never moves: it hashes what a question is about, so no target is in both parts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from query_mutator.types import Question

TEST_PERCENT = 38


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """The questions to learn from and the held-out ones."""

    train: tuple[Question, ...]
    test: tuple[Question, ...]


def target_key(question: Question) -> str:
    """Return what the question is about: its first accepted name, else its own text."""
    return question.accept[0] if question.accept else question.text


def in_test(question: Question, *, test_percent: int = TEST_PERCENT) -> bool:
    """Return whether a question is held out: sha256 of its target modulo 100, so adding rows moves no other row."""
    digest = hashlib.sha256(target_key(question).encode()).hexdigest()
    return int(digest[:8], 16) % 100 >= 100 - test_percent


def split_questions(questions: Iterable[Question], *, test_percent: int = TEST_PERCENT) -> Split:
    """Return the hash-stable split; order within each part is kept."""
    train: list[Question] = []
    test: list[Question] = []
    for question in questions:
        (test if in_test(question, test_percent=test_percent) else train).append(question)
    return Split(train=tuple(train), test=tuple(test))
