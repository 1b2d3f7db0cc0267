"""A rewrite operator: a name, a prompt that asks a mutator model for the rewrite, and the guards of the rewrite."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Protocol

from query_mutator.errors import UsageError
from query_mutator.operators.cleaning import clean
from query_mutator.operators.guards import GUARDS, failed_guard
from query_mutator.registry import check_known
from query_mutator.types import read_part

_SLOT = re.compile(r"\{(question|neighbor|domain|answer)\}")

#: What `ollama_utils.batch_query_target_model` returns for a query whose call failed; never used for learning.
DEFAULT_REFUSAL = "I'm sorry, I can't help with that."

_FENCE = re.compile(r"```(?:[\w-]*\n)?(.*?)(?:```|\Z)", re.DOTALL)
_TAG = re.compile(r"</?question>", re.IGNORECASE)
_COURTESY = re.compile(r"\A(?:sure|certainly|of course|absolutely)\s*!\s+", re.IGNORECASE)
_EMPHASIS = re.compile(r"\A(\*{1,3})([^*]+)\1\Z")
_ENGLISH = re.compile(r"[a-z]+(?:'[a-z]+)*")
_APOSTROPHE = re.compile(r"(?<=\w)['’](?=\w)")
_QUOTES = {'"': '"', "'": "'", "“": "”", "‘": "’", "«": "»", "`": "`"}

# What a reply may say before a colon: "Question", "Rewritten query (shorter)", "Sure, here is the rephrased version".
_CHANGED = (
    r"(?:re-?(?:written|write|phrased|phrasing|worded)|revised|improved|corrected|clarified|simplified|shortened)"
)
_LABEL = re.compile(
    rf"""\W*(?:
        (?:the\s)?(?:{_CHANGED}|new|final)?\s*(?:question|query|version|text|output)\s*(?:is|\(.*\))?
      | {_CHANGED}
      | (?:sure|okay|ok|certainly|of\ course|here|this\ is|the)\b.*\b{_CHANGED}\b.*
    )[\W_]*""",
    re.IGNORECASE | re.VERBOSE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorContext:
    """What an operator may use in addition to the current question; domain and neighbor are fixed for a run."""

    domain: str = "general knowledge"
    neighbor: str | None = None  # the nearest other training question
    original: str | None = None  # the question before the first rewrite
    answer: str | None = None  # the target's to the current question; None if it was not asked


class Operator(Protocol):
    """One way to rewrite a question.

    It may also have a local test `would_change(question, *, context) -> bool`: where it is False, no model is called.
    One with `rewrite(question, *, context) -> str` is local: it never calls a model. `guards` names the checks that its
    rewrites must pass: by default all of `GUARDS`, and none of a local one.
    """

    @property
    def name(self) -> str: ...

    @property
    def summary(self) -> str: ...

    def render(self, question: str, *, context: OperatorContext) -> str:
        """Return the prompt that asks a mutator model to rewrite `question`."""


def local_rewrite(operator: Operator) -> Callable[..., str] | None:
    """Return `rewrite(question, *, context)` of an operator that is carried out in this process, None for others."""
    return getattr(operator, "rewrite", None)


def would_change(operator: Operator, question: str, *, context: OperatorContext) -> bool:
    """Return what the operator's local test says; True for an operator without one."""
    local = local_rewrite(operator)
    if local is not None:
        return local(question, context=context) != question
    test = getattr(operator, "would_change", None)
    return test is None or bool(test(question, context=context))


def rejecting_guard(operator: Operator, question: str, rewrite: str, *, context: OperatorContext) -> str | None:
    """Return the guard of an operator that its rewrite of `question` fails, None if the rewrite may be used."""
    guards = getattr(operator, "guards", GUARDS if local_rewrite(operator) is None else ())
    if rewrite == question or not guards:
        return None
    prompt = operator.render(question, context=context)
    texts = (context.domain, context.neighbor, context.answer)
    return failed_guard(guards, question, rewrite, given=[text for text in texts if text and text in prompt])


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOperator:
    """An operator that is a prompt for a mutator model."""

    name: str
    summary: str
    template: str  # with {question}, and {neighbor}, {domain} or {answer} where it needs them
    guards: tuple[str, ...] = GUARDS
    test: Callable[[str], bool] | None = field(default=None, compare=False)  # whether it would change a question

    def __post_init__(self) -> None:
        for name in self.guards:
            check_known("guard", name, GUARDS)

    @classmethod
    def of(
        cls,
        name: str,
        summary: str,
        prompt: str,
        *,
        guards: Sequence[str] = GUARDS,
        test: Callable[[str], bool] | None = None,
    ) -> PromptOperator:
        """Return the operator of a prompt; ValueError for one without {question} or {answer} in it.

        `guards` are the checks of its rewrites. `test` returns whether the rewrite would change a question; it must be
        fast, because every step asks it.
        """
        if "{question}" not in prompt and "{answer}" not in prompt:
            raise ValueError(f"operator {name!r}: its prompt must hold {{question}}")
        return cls(name=name, summary=summary, template=f"{prompt.strip()}\n", guards=tuple(guards), test=test)

    def would_change(self, question: str, *, context: OperatorContext) -> bool:
        """Return whether the rewrite would change a question; an operator needs what its prompt has a slot for."""
        if self.test is not None and not self.test(question):
            return False
        if context.answer is None and "{answer}" in self.template:
            return False
        return context.neighbor is not None or "{neighbor}" not in self.template

    def render(self, question: str, *, context: OperatorContext) -> str:
        """Return the prompt with question and context filled in; braces in a question are kept."""
        values = {
            "question": question,
            "neighbor": context.neighbor or "",
            "domain": context.domain,
            "answer": context.answer or "",
        }
        return _SLOT.sub(lambda match: values[match[1]], self.template)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalOperator:
    """An operator that is a function of question and context, carried out in this process; it costs no call."""

    name: str
    summary: str
    function: Callable[[str, OperatorContext], str]
    guards: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in self.guards:
            check_known("guard", name, GUARDS)

    def rewrite(self, question: str, *, context: OperatorContext) -> str:
        """Return the rewritten question."""
        found = self.function(question, context)
        if not isinstance(found, str):
            raise UsageError(f"operator {self.name!r} returned {type(found).__name__}; return the question as text")
        return found

    def render(self, question: str, *, context: OperatorContext) -> str:
        """Return the question: no prompt is ever sent."""
        return question


@cache
def english_words() -> frozenset[str]:
    """Return the whole words of the encoder's vocabulary."""
    from query_mutator.encoder import vocabulary  # loads numpy

    return frozenset(word for word in vocabulary() if re.fullmatch(r"[a-z]+", word))


@lru_cache(maxsize=16_384)
def has_unknown_word(text: str) -> bool:
    """Return whether a word of a text is not an English one: the test of `spelling`, which spares its call."""
    return not english_words().issuperset(_ENGLISH.findall(text.lower().replace("’", "'")))


def clean_rewrite(text: str) -> str:
    """Return the question in a model's reply on one line, or "" when there is none.

    Thinking, code fences, labels such as "Rewritten question:", surrounding quotes and emphasis, and every paragraph
    after the first are removed.
    """
    text = _TAG.sub("", _FENCE.sub(r"\1", read_part(text))).strip()
    text = _without_label(_COURTESY.sub("", text))
    first_paragraph = re.split(r"\n\s*\n", text, maxsplit=1)[0]
    return _unquoted(" ".join(first_paragraph.split()))


def _without_label(text: str) -> str:
    label, colon, rest = text.partition(":")
    if colon and "\n" not in label and _LABEL.fullmatch(label):
        return rest.lstrip("*_ \t\n")  # the end of a bold label
    return text


def _unquoted(text: str) -> str:
    """Return text without the marks that surround all of it; quotes around a part stay."""
    while _is_quoted(text):
        text = text[1:-1].strip()
    return _EMPHASIS.sub(r"\2", text)


def _is_quoted(text: str) -> bool:
    if len(text) < 2 or _QUOTES.get(text[0]) != text[-1]:
        return False
    inside = _APOSTROPHE.sub("", text[1:-1])
    return text[0] not in inside and text[-1] not in inside


CLEAN = LocalOperator(
    name="clean",
    summary="Take greetings and thanks off an English question.",
    function=lambda question, context: clean(question),
)
