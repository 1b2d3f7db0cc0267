"""What a program gets for a question."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from query_mutator.session.play import Step, Stopped
from query_mutator.types import AS_IS, ErrorInfo, Message

__all__ = ["Rewrite", "Step"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewrite:
    """A question as the policy rewrote it, and the answer it would submit."""

    question: str
    text: str  # the wording whose answer was submitted; without an answer the last one
    form: str = AS_IS  # in which it was asked
    messages: tuple[Message, ...] = ()  # of that request: the wording in its form
    options: Mapping[str, Any] = field(default_factory=dict)  # of that request, such as {"stop": ["\n"]}
    temperature: float = 0.0  # of that request
    answer: str | None  # None if the target was not asked, or no call to it succeeded
    steps: tuple[Step, ...]
    calls: int  # to both models
    seconds: float
    why: str = ""  # the rule that chose the answer, with the numbers it compared
    stopped: Stopped | Literal["policy"] = "policy"  # what ended it
    error: ErrorInfo | None = None  # the failed call that ended it, if one did

    @property
    def is_changed(self) -> bool:
        """Return whether the submitted wording or form differs from the question as it is."""
        return (self.text, self.form) != (self.question, AS_IS)

    @property
    def operators(self) -> tuple[str, ...]:
        """Return the actions in order."""
        return tuple(step.operator for step in self.steps)

    @property
    def rejected(self) -> tuple[tuple[str, str], ...]:
        """Return operator and guard of each rewrite that was not used."""
        return tuple((step.operator, step.guard) for step in self.steps if step.guard is not None)

    @property
    def changes(self) -> tuple[Step, ...]:
        """Return the steps that made a new wording or form, each pair of them once."""
        start = (self.question, AS_IS)
        first = {step.asked: step for step in reversed(self.steps) if step.asked != start}
        return tuple(step for step in self.steps if first.get(step.asked) is step)
