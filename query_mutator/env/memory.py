"""What is known of one question: episodes that share a memory make each rewrite, answer and local test once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from query_mutator.env.episode import Asked, Attempt
from query_mutator.types import ErrorInfo

__all__ = ["QuestionMemory", "Rewriting", "Wording"]


#: An operator's number, the text it is applied to, and the form in which that is answered: some use the answer.
Wording = tuple[int, str, str | None]


class Rewriting(NamedTuple):
    """The wording after an operator: its rewrite, or the wording before where a `guard` rejected that."""

    text: str
    guard: str | None = None


@dataclass(frozen=True, slots=True)
class QuestionMemory:
    """Results of the calls and local tests on one question; an ErrorInfo where a call failed for good."""

    rewrites: dict[Wording, Rewriting | ErrorInfo] = field(default_factory=dict)
    attempts: dict[Asked, Attempt | ErrorInfo] = field(default_factory=dict)
    changes: dict[Wording, bool] = field(default_factory=dict)  # whether the operator may change the text
