"""A form of the request: a name, and a function that turns a question into the messages and options of a call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from query_mutator.types import Message, read_part

__all__ = ["Example", "Form", "FormContext", "Framed"]


@dataclass(frozen=True, slots=True)
class Example:
    """A question with its accepted answer, to show the target; never the question that is asked."""

    question: str
    answer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FormContext:
    """What a form may use in addition to the current wording; fixed for a question."""

    domain: str = ""
    original: str = ""  # the question before the first rewrite
    examples: tuple[Example, ...] = ()  # the nearest ones, the nearest last


@dataclass(frozen=True, slots=True, kw_only=True)
class Framed:
    """Messages and options of a call; what is None is as in the run's other calls."""

    messages: tuple[Message, ...]
    temperature: float | None = None
    max_tokens: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)  # of the server, such as {"stop": ["\n"]}

    @classmethod
    def user(cls, text: str, *, system: str | None = None, **options: Any) -> Framed:
        """Return a request of one user message, after a `system` message if there is one."""
        before = () if system is None else (Message(role="system", content=system),)
        return cls(messages=(*before, Message(role="user", content=text)), **options)

    @property
    def text(self) -> str | None:
        """Return the text of a request that is one user message and nothing else, None for others."""
        is_text = len(self.messages) == 1 and not self.options and self.temperature is None and self.max_tokens is None
        return self.messages[0].content if is_text else None


def whole_reply(reply: str) -> str:
    """Return the reply."""
    return reply


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """One way to put a question to the target; it calls no model.

    `read` returns the answer in a reply, for scoring: the last line where the form asks for steps before it.
    """

    name: str
    summary: str
    function: Callable[[str, FormContext], Framed | str]  # a text is one user message
    read: Callable[[str], str] = whole_reply
    uses_examples: bool = False

    def frame(self, text: str, *, context: FormContext) -> Framed:
        """Return messages and options for a wording."""
        framed = self.function(text, context)
        return Framed.user(framed) if isinstance(framed, str) else framed

    def answer_in(self, reply: str) -> str:
        """Return the answer in the part of a reply that is read."""
        return self.read(read_part(reply))

    def where(self, usable: Callable[[Framed], bool]) -> Form:
        """Return the form that leaves a question as it is worded where its request is not usable."""

        def function(text: str, context: FormContext) -> Framed:
            framed = self.frame(text, context=context)
            return framed if usable(framed) else Framed.user(text)

        return replace(self, function=function)

    @classmethod
    def of(
        cls,
        name: str,
        summary: str,
        template: str,
        *,
        system: str | None = None,
        read: Callable[[str], str] = whole_reply,
    ) -> Form:
        """Return the form of a text with {question} in it; ValueError without one."""
        if "{question}" not in template:
            raise ValueError(f"form {name!r}: its text must hold {{question}}")

        def function(text: str, context: FormContext) -> Framed:
            return Framed.user(template.replace("{question}", text), system=system)

        return cls(name=name, summary=summary, function=function, read=read)
