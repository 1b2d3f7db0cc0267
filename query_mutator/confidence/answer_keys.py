"""Replies as P(right) reads them: attempts at a question, and graded ones to learn from."""

from __future__ import annotations

from dataclasses import dataclass

from query_mutator.types import AS_IS, read_part


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One reply to a question: its text as far as it is read, the form of the request, and what the server said."""

    text: str
    asked: str = ""  # the wording that was asked; "" is the question
    form: str = AS_IS
    logprob: float | None = None  # mean log probability of the reply's tokens; None where it is not known
    cut: bool | None = None  # ended at the token limit; None where it is not known
    context: str = ""  # what the target read besides the question: system text, examples

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", read_part(self.text))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedAnswer:
    """A graded answer to learn from; answers to the same question are the other attempts at it."""

    question: str
    attempt: Attempt
    right: bool
    target: str = ""  # what the question is about (`data.split.target_key`): never in two folds; "" is the question
    gold: str | None = None  # read only to tell how answers are compared

    @property
    def group(self) -> str:
        """Return the target, else the question."""
        return self.target or self.question
