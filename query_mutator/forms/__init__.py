"""Forms of the request: how a question is put to the target, without a model's call.

Offers `FORMS`, the registry to add your own to; `Form`, a name and a function that turns a question into the messages
and options of a call; its `FormContext` with `Example`s, and `Framed`, what it returns; and `select`, which reads
`--forms`. No form changes or drops a word of the question.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from query_mutator.reading.marks import last_answer
from query_mutator.registry import Registry
from query_mutator.types import AS_IS, Message, Think, read_part

__all__ = ["ALL", "FORMS", "Example", "Form", "FormContext", "Framed", "arm_named", "arms", "select"]

ALL, NONE = "all", "none"


@dataclass(frozen=True, slots=True)
class Example:
    """A question with its accepted answer, to show the target; never the question that is asked."""

    question: str
    answer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FormContext:
    """Inputs of a form besides the current wording; fixed for a question."""

    domain: str = ""
    original: str = ""  # the question before the first rewrite
    examples: tuple[Example, ...] = ()  # the nearest ones, the nearest last


@dataclass(frozen=True, slots=True, kw_only=True)
class Framed:
    """Messages and options of a call; what is None is as in the run's other calls."""

    messages: tuple[Message, ...]
    temperature: float | None = None
    max_tokens: int | None = None
    think: Think | None = None
    options: Mapping[str, Any] = field(default_factory=dict)  # of the server, such as {"stop": ["\n"]}

    @classmethod
    def user(cls, text: str, *, system: str | None = None, **options: Any) -> Framed:
        """Return a request of one user message, after a `system` message if there is one."""
        before = () if system is None else (Message(role="system", content=system),)
        return cls(messages=(*before, Message(role="user", content=text)), **options)

    @property
    def text(self) -> str | None:
        """Return the text of a request that is one user message and nothing else, None for others."""
        is_text = len(self.messages) == 1 and self == Framed(messages=self.messages)
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
    model: str = ""  # that is asked; "" is the target of the run
    sample: int = 0  # the number of a further reply at the temperature of samples; 0: the first one

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


def _examples(text: str, context: FormContext) -> Framed:
    turns = [
        message
        for example in context.examples
        for message in (
            Message(role="user", content=example.question), Message(role="assistant", content=example.answer)
        )
    ]  # fmt: skip
    return Framed(messages=(*turns, Message(role="user", content=text)))


def _examples_text(text: str, context: FormContext) -> Framed:
    shown = [f"Question: {example.question}\nAnswer: {example.answer}" for example in context.examples]
    prompt = "\n\n".join([*shown, f"Question: {text}\nAnswer:"])
    return Framed.user(prompt, options={"stop": ["\nQuestion:"]})


FORMS: Registry[Form] = Registry("form", group="query_mutator.forms")
for _form in (
    Form(name=AS_IS, summary="The question as it is worded.", function=lambda text, context: text),
    Form.of("question_answer", "In the frame of a quiz.", "Question: {question}\nAnswer:"),
    Form.of("short_answer", "In the frame of a quiz that wants a short answer.", "Question: {question}\nShort answer:"),
    Form.of("statement", "As the beginning of a sentence to complete.", 'The answer to the question "{question}" is'),
    Form.of(
        "expert",
        "To an expert who states the answer.",
        "You are a helpful expert. State the correct answer.\nQuestion: {question}\nAnswer:",
    ),
    Form.of(
        "read_twice",
        "Read again (Xu et al., 2023, arXiv:2309.06275).",
        "{question}\nRead the question again: {question}",
    ),
    Form.of("one_sentence", "Answered in one full sentence.", "{question}\nAnswer in one full sentence."),
    Form.of("few_words", "Answered in a few words.", "{question}\nAnswer in a few words."),
    Form.of(
        "steps",
        "Steps first, then the answer on a separate line (Kojima et al., 2022, arXiv:2205.11916).",
        "{question}\nThink step by step. Then write the answer alone on the last line, after \"Answer:\".",
        read=last_answer,
    ),
    Form.of("restate", "Restated, then answered (Deng et al., 2023, arXiv:2311.04205).",
            "{question}\nRestate the question in clear words, then answer it."),
    Form(
        name="examples",
        summary="After the nearest questions with their answers, as turns.",
        function=_examples,
        uses_examples=True,
    ),
    Form(
        name="examples_text",
        summary="After the nearest questions with their answers, as one text.",
        function=_examples_text,
        uses_examples=True,
    ),
):  # fmt: skip
    FORMS.add(_form.name, _form)


def arms(forms: Sequence[Form], models: Sequence[str]) -> tuple[Form, ...]:
    """Return the arms of several models: each model with the question as it is worded, then in each form.

    MODEL is the name of the first kind, FORM@MODEL of the second.
    """
    others = [form for form in forms if form.name != AS_IS]
    named = [*models, *(f"{form.name}@{model}" for form in others for model in models)]
    return tuple(filter(None, (_arm(name, models) for name in named)))


def arm_named(name: str, models: Sequence[str] = ()) -> Form | None:
    """Return a form, or one that asks one of some models, by its name; None for an unknown one."""
    return _arm(name, models) or (FORMS.get(name) if name in FORMS else None)


def _arm(name: str, models: Sequence[str]) -> Form | None:
    """Return the form of a name that asks one of some models, or again (FORM#2); None for another name."""
    if name in models:
        return replace(FORMS.get(AS_IS), name=name, model=name)
    first, _, number = name.rpartition("#")
    if number.isdecimal() and int(number) > 1 and (asked := arm_named(first, models)) is not None:
        return replace(asked, name=name, sample=int(number) - 1)
    form, _, model = name.partition("@")
    return replace(FORMS.get(form), name=name, model=model) if model in models and form in FORMS else None


def select(spec: str = "", models: Sequence[str] = (), *, samples: int = 1) -> tuple[Form, ...]:
    """Return the forms of `a,b,c` in that order, each once; an empty text and `none` stand for none.

    `all` stands for those of the package and of plugins but `as_is`, in which an episode begins. With several `models`
    the arms of these, with several `samples` further replies in each form, by default `as_is`; where an arm is named,
    names stand for themselves alone.
    """
    wanted = [name.strip() for name in spec.split(",") if name.strip() and spec != NONE]
    if wanted == [ALL]:
        wanted = [name for name in FORMS.registered() if name != AS_IS]
    if any(_arm(name, models) for name in wanted):
        return tuple(arm_named(name, models) or FORMS.get(name) for name in dict.fromkeys(wanted))
    forms = tuple(FORMS.get(name) for name in dict.fromkeys(wanted))
    first = arms(forms, models) if len(models) > 1 else forms or (FORMS.get(AS_IS),) * (samples > 1)
    again = (replace(form, name=f"{form.name}#{n + 1}", sample=n) for n in range(1, samples) for form in first)
    return (*first, *again)
