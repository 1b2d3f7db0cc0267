"""Rewrite operators, registered by name; `prompts.toml` has those that a mutator model carries out.

Offers `OPERATORS`, the registry to add your own to; `PromptOperator`, an operator made of a prompt;
`LocalOperator`, one that is a function; the `Operator` Protocol and its `OperatorContext`; `GUARDS`, the checks of a
rewrite, and `rejecting_guard`, which makes them; and `select`, which reads `--operators`. The order of registration is
the order of the policy's actions.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib import resources
from typing import Protocol

from query_mutator.errors import UsageError
from query_mutator.operators.guards import GUARDS, LANGUAGES, LAST_LATIN, failed_guard, words_in
from query_mutator.registry import Registry, check_known
from query_mutator.types import read_part

__all__ = [
    "GUARDS", "OPERATORS", "LocalOperator", "Operator", "OperatorContext", "PromptOperator",
    "english_words", "local_rewrite", "rejecting_guard", "select", "would_change",
]  # fmt: skip

_SLOT = re.compile(r"\{(question|neighbor|domain|answer)\}")

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


_WHO = r"(?:there|all|everyone|everybody|folks|guys|again|team)"
_GREETING = rf"(?:(?:hi|hello|hey|greetings|good (?:morning|afternoon|evening|day))(?: {_WHO})*|dear {_WHO})"
_THANKS = (
    r"(?:many |kind )?(?:thanks|thank you|thx)(?: (?:so much|very much|a lot|again|in advance))*"
    r"(?: for (?:your|the|any) (?:help|time))?"
)
_FIRST = re.compile(rf"\s*(?:{_GREETING}|{_THANKS})(?:\s*[.!]+\s+|[ \t]*(?:[,.!]+[ \t]*)?\n\s*)", re.IGNORECASE)
_LAST = re.compile(
    rf"(?:(?<=[.!?])\s+|\s*\n\s*)(?:{_THANKS}|(?:best|kind|warm) regards)[ \t]*[,.!]*\s*\Z", re.IGNORECASE
)
LAST_CHARS = 100  # in which thanks are looked for
#: Text that may be about its own words, has code, quotes or something pasted, or is a list.
_MAY_BE_ABOUT_ITSELF = re.compile(
    r"[\"“”«»‘`{}<>=]|:(?=\s|\Z)|^(?: {4}|\t)|^[ \t]*(?:[-*•]|\d+[.)]) "
    r"|\b(?:say|said|spell|mean|answer|repl[yi]|respon[ds]|writ|greet|salut|translat|pronounc|proof|correct|rhym"
    r"|polit|word|phras|sentenc|lyric|letter|e?mail|messag|text|syllabl|vowel|quot|tone\b|title|complet|continu|summar"
    r"|edit|(?:count|sort|list|s[aiou]ng)(?:s|ed|ing)?\b)",
    re.IGNORECASE | re.MULTILINE,
)
#: Words of a question that may stand for the greeting before it.
_POINTS_BACK = re.compile(r"\b(?:it|its|this|that|these|those|they)\b", re.IGNORECASE)


def clean(text: str) -> str:
    """Return an English text without the greetings before it and the thanks after it; a question is always left."""
    if not _is_english(text) or _MAY_BE_ABOUT_ITSELF.search(text):
        return text
    start, end = 0, len(text)
    while found := _FIRST.match(text, start):
        start = found.end()
    while found := _LAST.search(text, max(start, end - LAST_CHARS), end):
        end = found.start()
    left = text[start:end]
    if len(left.split()) < 2 or (start and _POINTS_BACK.search(left)):
        return text
    return left


def _is_english(text: str) -> bool:
    """Return whether no other alphabet is in a text, and no other language has more of its frequent words."""
    if any(letter.isalpha() and ord(letter) > LAST_LATIN for letter in text):
        return False
    words = set(words_in(text))
    return max(LANGUAGES, key=lambda name: len(LANGUAGES[name] & words)) == "en"  # which is the first of equals


#: Must be named in `--operators`: they may lose a part of the meaning, or read English only.
_NOT_DEFAULT = ("imperative", "keywords", "first_part", "merge", CLEAN.name)

NONE = "none"

_TESTS = {"spelling": has_unknown_word}

OPERATORS: Registry[Operator] = Registry("operator", group="query_mutator.operators")


_prompts = resources.files("query_mutator.operators").joinpath("prompts.toml").read_text(encoding="utf-8")
for _name, _parts in tomllib.loads(_prompts).items():
    OPERATORS.add(_name, PromptOperator.of(_name, test=_TESTS.get(_name), **_parts))
OPERATORS.add(CLEAN.name, CLEAN)


def select(spec: str = "") -> tuple[Operator, ...]:
    """Return the operators of `a,b,c` in that order, each once.

    An empty text stands for those of plugins and the rewrites by a mutator model that keep the meaning, `none` for
    none. Operators of installed distributions must be named: installing one must not change the actions of a run.
    """
    wanted = [name.strip() for name in spec.split(",") if name.strip()]
    if wanted == [NONE]:
        return ()
    default = [name for name in OPERATORS.registered() if name not in _NOT_DEFAULT]
    return tuple(OPERATORS.get(name) for name in (dict.fromkeys(wanted) or default))
