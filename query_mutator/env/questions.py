"""Which question an episode is about."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import numpy as np

__all__ = ["QuestionOrder"]


class QuestionOrder:
    """The indices of `count` questions in random order; each comes once before any comes again.

    Those in `left_out` do not come, unless all are.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self.waiting: list[int] = []  # the next is the last
        self.left_out: set[int] = set()

    def draw(self, rng: np.random.Generator) -> int:
        """Return the next index."""
        while True:
            if not self.waiting:
                self.waiting = [int(index) for index in rng.permutation(self._count)]
            index = self.waiting.pop()
            if index not in self.left_out or len(self.left_out) == self._count:
                return index

    def chosen(self, options: Mapping[str, Any] | None) -> int | None:
        """Return `options["question"]`, None without; ValueError unless there is a question of this index."""
        index = (options or {}).get("question")
        if index is None:
            return None
        if not 0 <= operator.index(index) < self._count:
            raise ValueError(f"options['question']={index} must be from 0 to {self._count - 1}")
        return operator.index(index)
